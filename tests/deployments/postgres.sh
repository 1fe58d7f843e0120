#!/usr/bin/env bash
# The tests of a running server, pool and worker, on PostgreSQL and with authentication.
#
#     tests/deployments/postgres.sh [PYTHON] [pytest arguments]
#
# Needs Debian's package postgresql, whose programs make a database in a temporary folder; it
# listens on a socket in there only. As root, PostgreSQL runs as the user postgres.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
shift || true
bin=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -1)
folder=$(mktemp -d)
as=()
if [ "$(id -u)" = 0 ]; then
    chown postgres "$folder"
    as=(setpriv --reuid=postgres --regid=postgres --clear-groups)
fi
cleanup() {
    "${as[@]}" "$bin/pg_ctl" --pgdata="$folder/data" --mode=fast stop >/dev/null || true
    rm -rf "$folder"
}
trap cleanup EXIT

cd "$folder"
"${as[@]}" "$bin/initdb" --pgdata="$folder/data" --username=scgpu --auth=trust >/dev/null
"${as[@]}" "$bin/pg_ctl" --pgdata="$folder/data" --log="$folder/log" --wait \
    --options="-k $folder -c listen_addresses=" start >/dev/null
"${as[@]}" "$bin/createdb" --host="$folder" --username=scgpu prefect
"${as[@]}" "$bin/psql" --host="$folder" --username=scgpu --quiet prefect \
    --command='CREATE EXTENSION pg_trgm'
cd - >/dev/null

export SCGPU_TEST_DATABASE="postgresql+asyncpg://scgpu@/prefect?host=$folder"
"$python" -m pytest -p no:xdist tests/deployments/test_operated.py "$@"
"${as[@]}" "$bin/psql" --host="$folder" --username=scgpu prefect --command='
    SELECT flow.name, state_type, count(*) FROM flow_run JOIN flow ON flow.id = flow_id
    GROUP BY 1, 2 ORDER BY 1, 2'
