#!/bin/sh
# Post the demo job; the key of the request is fixed, so that a second start posts no second one.
set -eu
TRAINER_API_KEY=$(cat "$TRAINER_API_KEY_FILE")
export TRAINER_API_KEY
exec turnwise jobs submit configs/crafter_cpu.toml --idempotency-key compose-demo
