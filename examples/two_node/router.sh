#!/bin/sh
# The router, on any host that reaches both; clients talk to it.
#   ./router.sh PREFILL_ADDRESS DECODE_ADDRESS [--host MY_ADDRESS] [--port 9000]
# Environment: PREFILL_PORT, DECODE_PORT (8000), KVFERRY (the kvferry command).
set -eu
[ $# -ge 2 ] || { echo "usage: $0 PREFILL_ADDRESS DECODE_ADDRESS [router arguments]" >&2; exit 2; }
PREFILL=http://$1:${PREFILL_PORT:-8000} DECODE=http://$2:${DECODE_PORT:-8000}
shift 2
# shellcheck disable=SC2086
exec ${KVFERRY:-kvferry} router --prefill "$PREFILL" --decode "$DECODE" "$@"
