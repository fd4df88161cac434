#!/usr/bin/env bash
# Builds the image of the Dockerfile and runs the demo in it, without a network.
set -euo pipefail
cd "$(dirname "$0")/../.."
docker build -t fairseq-ccpr .
docker run --rm --network none fairseq-ccpr demo
