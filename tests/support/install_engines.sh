#!/usr/bin/env bash
# What the tests of container sandboxes need, on Debian 12 or later, as root: Docker Engine, Podman with runc, a registry.
# Nothing of it is started; the tests start private ones and end them. Without these packages they are skipped.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
# No service of these packages is to run on the machine.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get install -y -qq --no-install-recommends \
    docker.io podman runc docker-registry busybox iproute2 procps psmisc util-linux iptables >/dev/null
