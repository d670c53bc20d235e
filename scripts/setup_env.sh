#!/usr/bin/env bash
# Make .venv, or bring it up to date: bash scripts/setup_env.sh requirements.txt|requirements-dev.txt
# Needs python3 (3.11 or later) and a package registry; uses uv if available, because uv is much faster than pip.
# A second call does nothing; the call after an interrupted one repairs .venv; concurrent calls wait for each other.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.8
REQUIREMENTS=${1:?give requirements.txt or requirements-dev.txt}
PYTHON=${PYTHON:-python3}
STAMP=.venv/.installed-
UNFINISHED=.venv/.unfinished
CROP_JPEG=zerovision/training/data/reading/native/crop_jpeg.c
SCRATCH=
trap '[[ -z $SCRATCH ]] || rm -rf -- "$SCRATCH"' EXIT

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 2
}

wanted() {
    cksum requirements.txt "$1"
    ! [[ -f $CROP_JPEG ]] || cksum "$CROP_JPEG"
}

up_to_date() {
    local stamp=$STAMP$REQUIREMENTS
    [[ -f $stamp && ! -e $UNFINISHED && -x .venv/bin/python && $(<"$stamp") == "$(wanted "$REQUIREMENTS")" ]]
}

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Sets CHOSEN to the version of PYTHON; exits if that version is too old for .venv.
check_python() {
    CHOSEN=$(version "$PYTHON") ||
        die "'$PYTHON' is not Python 3.11 or later: name one, as in 'make setup PYTHON=python3.12'."
}

make_environment() {
    local interpreter
    interpreter=$("$PYTHON" -c 'import sys; print(sys.executable)')
    if [[ -n $UV ]]; then
        "$UV" venv --quiet --python "$interpreter" .venv
    else
        "$interpreter" -m venv .venv || die "cannot make .venv: install uv, or Python's venv module (package python3-venv)."
    fi
}

install_requirements() {
    if [[ -n $UV ]]; then
        env "${CERTIFICATES[@]}" "$UV" pip install --quiet --python .venv/bin/python -r "$REQUIREMENTS"
    else
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$REQUIREMENTS"
    fi
}

[[ -f $REQUIREMENTS ]] || die "no file '$REQUIREMENTS': give requirements.txt or requirements-dev.txt."
if command -v flock >/dev/null; then
    exec 9<requirements.txt
    flock 9
fi
if [[ $PYTHON != python3 ]]; then # the user has chosen it; the default may differ from an existing .venv
    check_python
    present=$(version .venv/bin/python) || present=$CHOSEN
    [[ $present == "$CHOSEN" || -e $UNFINISHED ]] ||
        die ".venv has Python $present, and '$PYTHON' is $CHOSEN: remove it with 'make clean' first, or leave PYTHON out."
fi
up_to_date && exit
check_python
printf 'setup: installing %s into .venv (5 GB; about a minute with a fast network)\n' "$REQUIREMENTS" >&2
UV=uv
if ! uv --version >/dev/null 2>&1; then
    SCRATCH=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --target "$SCRATCH" "uv==$UV_VERSION" >/dev/null 2>&1 || true
    UV=$SCRATCH/bin/uv
    [[ -x $UV ]] || UV= # no uv can be installed
fi
# Variables that make uv trust the authorities that pip trusts: uv has its own list, and a private network's authority
# is only in the system's list. If the system's list is empty, uv's list is used.
mapfile -t CERTIFICATES < <("$PYTHON" -c '
import os, ssl
system = ssl.get_default_verify_paths()
if system.cafile and os.path.getsize(system.cafile):
    print("SSL_CERT_FILE=" + system.cafile)
if system.capath and os.listdir(system.capath):
    print("SSL_CERT_DIR=" + system.capath)')
if [[ -e $UNFINISHED ]] || ! .venv/bin/python -c '' 2>/dev/null; then
    rm -rf .venv
    make_environment
fi
touch "$UNFINISHED"
if [[ -n $UV ]] && ! install_requirements; then
    # uv and pip look for proxies and indexes in different places, so pip may reach what uv cannot.
    printf 'setup: uv failed, trying pip\n' >&2
    UV=
    rm -rf .venv
    make_environment
    touch "$UNFINISHED"
fi
[[ -n $UV ]] || install_requirements || die "the packages of $REQUIREMENTS could not be installed: the lines above say why."
# Without compiled bytecode, every start compiles all imports again: 14 s to the first step instead of 9.
count='from zerovision.training.base.control_groups import usable_cores; print(usable_cores())'
cores=$(.venv/bin/python -c "$count" 2>/dev/null) || cores=1
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m compileall -q -j "$cores" \
    .venv/lib scripts zerovision models tests >/dev/null || true
# Optional: reading a JPEG takes a fifth less time; needs a C compiler and libjpeg-turbo's headers (package libjpeg-dev).
.venv/bin/python scripts/doctor.py --compile >/dev/null 2>&1 || true
for installed in "$REQUIREMENTS" $(sed -n 's/^-r //p' "$REQUIREMENTS"); do
    wanted "$installed" >"$STAMP$installed"
done
rm "$UNFINISHED"
