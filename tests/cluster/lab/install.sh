#!/usr/bin/env bash
# install.sh - the Debian packages that the labs of this folder and their tests need.
#
# Does nothing where they are there, and says what is missing where it cannot install them: the tests then skip.
set -euo pipefail

PACKAGES=(openssh-server iproute2 nftables procps munge slurmctld slurmd slurm-client)

missing=()
if command -v dpkg-query >/dev/null; then
    for package in "${PACKAGES[@]}"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
else
    missing=("${PACKAGES[@]}")
fi
((${#missing[@]})) || exit 0
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    printf 'install.sh: missing, and only root on Debian can install them here: %s\n' "${missing[*]}" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
