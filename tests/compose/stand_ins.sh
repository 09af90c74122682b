#!/bin/sh
# Images that stand in for python:3.12-slim and postgres:17-alpine where no registry of images answers.
#
#   sh tests/compose/stand_ins.sh        # on a Debian host, as root, with Docker, debootstrap and pip; minutes
#   PYTHON_IMAGE=turnwise-stand-in-python POSTGRES_IMAGE=turnwise-stand-in-postgres make test-compose
#
# Debian's Python and PostgreSQL of this host's release, so their versions are older. Packages come from where the host
# has its own: pip's settings, the folders of wheels that these name, and the certificates are copied into the image.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
debootstrap --variant=minbase --include=ca-certificates "$release" "$folder/debian" > /dev/null
tar -C "$folder/debian" -c . | docker import - turnwise-stand-in-debian > /dev/null
rm -rf "$folder/debian"

# Of equal keys the first counts, and `pip config list` begins with the environment's, which win.
mkdir -p "$folder/host/etc"
python3 -m pip config list | sed -En "s/^[^.]*\.([^=]*)='(.*)'\$/\1 = \2/p" \
  | awk '!/= file:/ && !seen[$1]++' > "$folder/keys"
{ echo "[global]" && cat "$folder/keys"; } > "$folder/host/etc/pip.conf"
for path in /etc/ssl/certs/ca-certificates.crt $(sed -En 's/^(cert|constraint|find-links) = //p' "$folder/keys"); do
  [ ! -e "$path" ] || tar -C / -ch ".$path" | tar -C "$folder/host" -x
done

# As in the official image, no library has compiled files, and pip may install for the system's Python.
cat > "$folder/python" <<'END'
FROM turnwise-stand-in-debian
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip python-is-python3 \
  && rm -rf /var/lib/apt/lists/* /usr/lib/python3*/EXTERNALLY-MANAGED \
  && find /usr/lib/python3* -name __pycache__ -prune -exec rm -rf {} +
COPY host /
END

# The user of the Alpine image, whose number docker-compose.yml has.
cat > "$folder/postgres" <<'END'
FROM turnwise-stand-in-debian
RUN groupadd --gid 70 postgres && useradd --uid 70 --gid 70 --home-dir /var/lib/postgresql postgres \
  && apt-get update && apt-get install -y --no-install-recommends postgresql && rm -rf /var/lib/apt/lists/* \
  && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin && rm -rf /var/lib/postgresql/* \
  && mkdir /var/lib/postgresql/data && chown -R postgres:postgres /var/lib/postgresql && chmod 700 /var/lib/postgresql/data
ENV PGDATA=/var/lib/postgresql/data
STOPSIGNAL SIGINT
COPY entrypoint /usr/local/bin/entrypoint
ENTRYPOINT ["entrypoint"]
END
cat > "$folder/entrypoint" <<'END'
#!/bin/sh
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" $POSTGRES_INITDB_ARGS
  pg_ctl --wait --options="-c listen_addresses=''" start
  createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  pg_ctl --wait stop
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
fi
exec postgres -c listen_addresses='*'
END
chmod 755 "$folder/entrypoint"

for name in python postgres; do
  docker build --quiet --tag "turnwise-stand-in-$name" --file "$folder/$name" "$folder"
done
