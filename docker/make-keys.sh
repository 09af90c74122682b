#!/bin/sh
# Make a random key in each folder of /keys that has none: at the first start in all, later in none.
set -eu
: "${KEYS:=/keys}"
make_key() {
  [ -s "$KEYS/$1/key" ] && return 0
  # Written to another file, then renamed: if this is stopped in between, no part of a key is left.
  (umask "$2" && python -c 'import secrets; print(secrets.token_urlsafe(32))' > "$KEYS/$1/.new")
  mv "$KEYS/$1/.new" "$KEYS/$1/key"
}
make_key task-app 077
make_key trainer 077
# Readable to all users, since PostgreSQL runs as another one; only it and the trainer mount this volume.
make_key database 022
