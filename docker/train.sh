#!/bin/sh
# The trainer container: train $JOB against $TASK_URL into runs/$RUN; started again, it goes on where it was.
set -eu
: "${JOB:=configs/crafter_cpu.toml}" "${RUN:=crafter_cpu}" "${TASK_URL:=dns+http://task-app:8001}"
: "${GATEWAY_HOST:=$(hostname)}" "${GATEWAY_PORT:=8100}"
# The values are TOML: text in quotes.
set -- --set "services.task_url=\"$TASK_URL\"" --set "services.gateway_host=\"$GATEWAY_HOST\"" \
  --set "services.gateway_port=$GATEWAY_PORT"
# exec, so that a stop of the container reaches Python, which saves the run.
if [ -e "runs/$RUN/run.json" ]; then
  exec turnwise train --resume "runs/$RUN" "$@"
fi
exec turnwise train "$JOB" --run "runs/$RUN" "$@"
