#!/usr/bin/env bash
# Chromium, in which CI opens the report: from Debian's packages, where none is there. Needs to be root.
set -euo pipefail

if command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null; then
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null
chromium --version
