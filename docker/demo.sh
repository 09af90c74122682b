#!/bin/sh
# Post short games of Crafter. The key of the request is that of its file: a second start posts no second job, an edited one does.
set -eu
if [ ! -r configs/crafter_cpu.toml ]; then
  echo "configs/ of this folder cannot be read in the container; on the host: chmod -R a+rX configs" >&2
  exit 1
fi
digest=$(sha256sum configs/crafter_cpu.toml | cut -c 1-16)
exec turnwise jobs submit configs/crafter_cpu.toml --idempotency-key "compose-demo-$digest"
