#!/usr/bin/env bash
# Set up a Milvus server of one machine, in an environment of its own, and run it until it is stopped:
#   scripts/recipes/milvus_server.sh FOLDER [PORT [--authorization-enabled true ...]]
# FOLDER keeps environment, data and logs; the port is 19530 unless another is given. Further options are those of milvus-server
# (-h lists them); MILVUS_VERSION is another version of the package milvus, 2.3.5 being the newest of it. The tests of Milvus, which
# pass on 2.3.5 and 2.3.0, use it where they are told so:
#   MILVUS_URI=http://127.0.0.1:19530 pytest tests/search/test_milvus.py tests/search/test_milvus_tokens.py
# Its parts speak to each other on the loopback interface, but Milvus listens on all: where others can reach the machine, have it
# ask for credentials. Two servers on one machine get into each other's way.
set -euo pipefail
folder=$(realpath -m "${1:?give a folder for environment, data and logs}")
port=${2:-19530}
shift $(($# < 2 ? $# : 2))
version=${MILVUS_VERSION:-2.3.5}
programs=$folder/$version/bin
if ! [ -x "$programs/milvus-server" ]; then
  python3 -m venv "$folder/$version"
  "$programs/pip" install --quiet "milvus==$version"
fi
# Its own --proxy-port takes the next one where a port is not free yet, as after a restart.
parts=(--extra-config "proxy.port=$port")
for part in proxy rootCoord queryCoord queryNode indexNode dataCoord dataNode; do
  parts+=(--extra-config "$part.ip=127.0.0.1")
done
exec "$programs/milvus-server" --data "$folder/data" "${parts[@]}" "$@"
