#!/bin/sh
# Post a job with short games of Crafter. Its idempotency key has the file's digest, so only a changed file is posted twice.
set -eu
if [ ! -r configs/crafter_cpu.toml ]; then
  echo "configs/ of this folder cannot be read in the container; on the host: chmod -R a+rX configs" >&2
  exit 1
fi
digest=$(sha256sum configs/crafter_cpu.toml | cut -c 1-16)
exec turnwise jobs submit configs/crafter_cpu.toml --idempotency-key "compose-demo-$digest"
