#!/usr/bin/env bash
# No outbound connection is attempted: server, worker, deployments and both flows run under strace,
# in a network namespace with nothing but loopback where that is allowed, and every address that
# a process connects or sends to is listed.
#
#     tests/deployments/quiet_outside.sh [PYTHON]
#
# Needs strace. Exit status 0: only loopback was asked for.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

run=("$python" -m pytest -q -p no:xdist -p no:cacheprovider tests/deployments/test_operated.py)
if unshare --net true 2>/dev/null; then
    echo "In a network namespace with loopback only."
    run=(unshare --net -- sh -c 'ip link set lo up && exec "$@"' sh "${run[@]}")
fi
strace --follow-forks --seccomp-bpf --quiet=all --trace=connect,sendto,sendmsg,sendmmsg \
    --output="$folder/trace" "${run[@]}"

grep -oE 'inet_addr\("[^"]+"\)|inet_pton\(AF_INET6, "[^"]+"' "$folder/trace" |
    grep -oE '"[^"]+"' | sort | uniq -c | sort -rn >"$folder/addresses" || true
echo "Addresses that were asked for, and how often:"
cat "$folder/addresses"
if grep -vE '"(127\.[0-9.]+|::1|::ffff:127\.[0-9.]+)"' "$folder/addresses" >"$folder/outside"; then
    echo "Not loopback:" >&2
    grep -oE '"[^"]+"' "$folder/outside" | while read -r address; do
        grep -F "$address" "$folder/trace" | head -3 >&2
    done
    exit 1
fi
echo "Nothing but loopback."
