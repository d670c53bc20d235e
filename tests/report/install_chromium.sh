#!/usr/bin/env bash
# install_chromium.sh - Debian's Chromium, in which the tests of the report open it, and a font: without one, text has
# no height.
#
# Does nothing where there is a Chromium, and says what is missing where it cannot install it: the tests then skip.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    ! command -v "$name" >/dev/null || exit 0
done
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    printf 'install_chromium.sh: no Chromium, and only root on Debian can install it here\n' >&2
    exit 0
fi
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } ||
    printf 'install_chromium.sh: Chromium could not be installed: the tests of the page are left out\n' >&2
