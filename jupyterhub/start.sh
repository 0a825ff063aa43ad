#!/usr/bin/env bash
# Starts a hub, in the foreground:
#
#   jupyterhub/start.sh FOLDER one_machine      FOLDER: what install.sh made, such as /opt/dlojz
#   jupyterhub/start.sh FOLDER slurm_cluster
#
#   HUB_LOGIN        pam (default): accounts of this machine. trial: on loopback, one password
#   HUB_URL          where to listen (default: http://127.0.0.1:8000)
#   HUB_CERTIFICATE  HUB_KEY: the files of a TLS certificate, for https
#   HUB_STATE        the hub's own folder: database, cookie secret (default: FOLDER/state, or FOLDER/trial)
#   HUB_REPOSITORY   where the course is cloned from (default: FOLDER/course.git, or this clone), HUB_BRANCH: which branch
#   DLOJZ_...        what servers and jobs get: DLOJZ_DATA, the images (default: FOLDER/data), DLOJZ_SITE
#   HUB_PROFILES     HUB_ADDRESS, SLURM_CONF: see slurm_cluster.py
set -euo pipefail

die() { echo "start.sh: $*" >&2; exit 2; }

case ${1:-} in -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | head -n -1; exit ;; esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# = 2 ] || die "expected a folder and a configuration: start.sh /opt/dlojz one_machine"
[ -x "$1/env/bin/jupyterhub" ] && [ -e "$1/env/share/dlojz/server.py" ] || die "no JupyterHub in $1: run $here/install.sh $1 first"
folder=$(cd "$1" && pwd)
[ "$2" = one_machine ] || [ "$2" = slurm_cluster ] ||
  die "$2: expected one_machine or slurm_cluster"

export HUB_LOGIN=${HUB_LOGIN:-pam} HUB_URL=${HUB_URL:-http://127.0.0.1:8000}
[ "$HUB_LOGIN" != trial ] || HUB_STATE=${HUB_STATE:-$folder/trial} # not the accounts of a class
export HUB_STATE=${HUB_STATE:-$folder/state}
# What the hub and the servers write is private: files 0600, folders 0700, whatever a home's mode.
umask 077
mkdir -p "$HUB_STATE" && chmod 700 "$HUB_STATE" && cd "$HUB_STATE"
exec 9>lock && flock -w 10 9 || die "a hub runs in HUB_STATE=$HUB_STATE already: stop it, or choose another folder"

repository=$folder/course.git # the guide's; a trial has only the clone
[ "$HUB_LOGIN" != trial ] && [ -d "$repository" ] || repository=$(dirname "$here")
echo "The course's link for trainees:"
# No browser can go to 0.0.0.0, which is all addresses of this machine.
"$folder/env/bin/python" "$here/link.py" "${HUB_URL/0.0.0.0/$(hostname --fqdn)}" \
  "${HUB_REPOSITORY:-file://$repository}" ${HUB_BRANCH:+"$HUB_BRANCH"}

# A clean environment: the hub's would reach processes of trainees, and may hold an administrator's
# tokens.
keep=()
for name in ${!HUB_*} ${!DLOJZ_*} SLURM_CONF HOME; do
  [ -z "${!name:-}" ] || keep+=("$name=${!name}")
done
exec env -i "${keep[@]}" LANG=C.UTF-8 PATH="$folder/env/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin" \
  "$folder/env/bin/jupyterhub" -f "$here/$2.py"
