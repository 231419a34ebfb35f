#!/bin/sh
# Find or install bubblewrap for the tests of the sandbox. Usage: find_bwrap.sh. Without it they are skipped with the reason.
set -u
if command -v bwrap >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap) >/dev/null 2>&1
  command -v bwrap >/dev/null 2>&1 && exit 0
fi
echo "no bubblewrap found and it could not be installed: the sandbox tests will fail in CI and be skipped elsewhere" >&2
exit 0
