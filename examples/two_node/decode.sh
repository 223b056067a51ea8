#!/bin/sh
# The decode server, on the other host. The same flags: which role an engine plays is the router's choice, per request.
#   ./decode.sh MODEL MY_ADDRESS [more arguments of vllm serve]
exec env SCRIPT="$0" "$(dirname "$0")/prefill.sh" "$@"
