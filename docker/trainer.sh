#!/bin/sh
# The trainer container: jobs over HTTP and the dashboard, with runs in /app/runs and the store in PostgreSQL.
# With words it is `turnwise` with that store: `turnwise-trainer backup > FILE`, `turnwise-trainer restore < FILE`.
set -eu
: "${MAX_JOBS:=1}" "${GATEWAY_HOST:=$(hostname)}" "${DATABASE_USER:=turnwise}" "${DATABASE_NAME:=turnwise}"
export GATEWAY_HOST
if [ -n "${DATABASE_HOST:-}" ]; then
  # By a file, which libpq reads: an address with the password would stand in the environment of all that runs.
  : "${PGPASSFILE:=/tmp/pgpass}"
  # The password is of letters, digits, - and _ (make-keys.sh), so it stands in a line of that file as it is.
  (umask 077 && echo "*:*:*:*:$(cat "$DATABASE_PASSWORD_FILE")" > "$PGPASSFILE")
  export PGPASSFILE TURNWISE_DATABASE_URL="postgresql://$DATABASE_USER@$DATABASE_HOST/$DATABASE_NAME"
fi
[ $# -eq 0 ] || exec turnwise "$@"
# exec, so that a stop of the container reaches Python, which saves what the jobs have finished.
exec turnwise trainer --host 0.0.0.0 --port 8100 --data-dir runs --allow-root configs --max-jobs "$MAX_JOBS" \
  ${ALLOW_MODEL:+--allow-model "$ALLOW_MODEL"} ${ALLOW_CLUSTER:+--allow-cluster "$ALLOW_CLUSTER"}
