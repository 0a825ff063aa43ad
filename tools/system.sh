#!/usr/bin/env bash
# What the tests need from the system: a browser, a font, a Slurm, a C++ compiler for torch.compile,
# and for a JupyterHub npm and Debian's own Python with venv.
# Installs them on Debian and Ubuntu as root; elsewhere it says what is missing (and the tests that
# need it are skipped, but not in CI).
set -euo pipefail

packages=()
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || packages+=(chromium)
fc-list 2>/dev/null | grep -qi dejavu || packages+=(fonts-dejavu-core fontconfig)
command -v slurmctld >/dev/null && command -v munged >/dev/null || packages+=(slurm-wlm munge)
command -v ip >/dev/null || packages+=(iproute2)
command -v pgrep >/dev/null || packages+=(procps)
command -v g++ >/dev/null || packages+=(g++)
command -v openssl >/dev/null || packages+=(openssl) # torch.compile calls it
command -v npm >/dev/null || packages+=(npm)
/usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
headers=$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] || packages+=(python3-dev)
[ ${#packages[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
else
  echo "missing: ${packages[*]} (sudo apt-get install ${packages[*]})" >&2
  [ -z "${CI:-}" ]
fi
