#!/bin/sh
# The prefill server, on the host whose address the decode host reaches:
#   ./prefill.sh MODEL MY_ADDRESS [more arguments of vllm serve]
# Environment: PORT (8000), VLLM (the vllm command), KVFERRY_ALLOWED_PEERS (the network of both hosts, 10.0.0.0/24).
set -eu
[ $# -ge 2 ] || { echo "usage: ${SCRIPT:-$0} MODEL MY_ADDRESS [vllm serve arguments]" >&2; exit 2; }
unset SCRIPT
MODEL=$1 ADDRESS=$2
shift 2
export VLLM_HOST_IP="$ADDRESS"
# The control port binds to this one address; without it, it binds to loopback and other hosts cannot connect.
# shellcheck disable=SC2086
exec ${VLLM:-vllm} serve "$MODEL" --host "$ADDRESS" --port "${PORT:-8000}" \
  --kv-transfer-config '{"kv_connector": "KVFerryConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"side_channel_host": "'"$ADDRESS"'"}}' "$@"
