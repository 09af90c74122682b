#!/bin/sh
# The first start: a random key in each folder of /keys that has none. Later starts leave them alone.
set -eu
: "${KEYS:=/keys}"
make_key() {
  [ -s "$KEYS/$1/key" ] && return 0
  # Written aside and renamed: a stop in the middle leaves no half a key.
  (umask "$2" && python -c 'import secrets; print(secrets.token_urlsafe(32))' > "$KEYS/$1/.new")
  mv "$KEYS/$1/.new" "$KEYS/$1/key"
}
make_key task-app 077
make_key trainer 077
# PostgreSQL reads it as a user of its own; no other service has the volume.
make_key database 022
