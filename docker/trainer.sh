#!/bin/sh
# Start the trainer: jobs over HTTP and the dashboard, with runs in /app/runs and the store in PostgreSQL.
# With arguments, run `turnwise` with that store: `turnwise-trainer backup > FILE`, `turnwise-trainer restore < FILE`.
set -eu
: "${MAX_JOBS:=1}" "${GATEWAY_HOST:=$(hostname)}" "${DATABASE_USER:=turnwise}" "${DATABASE_NAME:=turnwise}"
export GATEWAY_HOST
if [ -n "${DATABASE_HOST:-}" ]; then
  # libpq reads the password from a file: in the address, it would be in the environment of every child process.
  : "${PGPASSFILE:=/tmp/pgpass}"
  # The password has only letters, digits, - and _ (make-keys.sh), so a line of that file needs no escapes.
  (umask 077 && echo "*:*:*:*:$(cat "$DATABASE_PASSWORD_FILE")" > "$PGPASSFILE")
  export PGPASSFILE TURNWISE_DATABASE_URL="postgresql://$DATABASE_USER@$DATABASE_HOST/$DATABASE_NAME"
fi
[ $# -eq 0 ] || exec turnwise "$@"
# exec, so that the container's stop signal reaches Python, which saves the finished iterations of the jobs.
exec turnwise trainer --host 0.0.0.0 --port 8100 --data-dir runs --allow-root configs --max-jobs "$MAX_JOBS" \
  ${ALLOW_MODEL:+--allow-model "$ALLOW_MODEL"} ${ALLOW_CLUSTER:+--allow-cluster "$ALLOW_CLUSTER"}
