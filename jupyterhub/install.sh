#!/usr/bin/env bash
# Installs what a hub needs into one folder that every user may read:
#
#   jupyterhub/install.sh FOLDER      such as /opt/dlojz; on a cluster, one that all nodes share
#
#   FOLDER/env      one environment for the hub and for all trainees: JupyterHub, JupyterLab, torch,
#                   and the package dlojz, installed from this clone but not editable
#   FOLDER/proxy    configurable-http-proxy, from npm
#   FOLDER/data     images of ImageNet's shape, unless DLOJZ_DATA names a folder
#   FOLDER/queue    the tickets of all trainees' jobs
#   FOLDER/gitconfig, gitattributes   how trainees' clones get FOLDER/course.git, and merge
#
# Again: brings the package up to date. Stop no server for it, but trainees restart their kernels.
set -euo pipefail

die() { echo "install.sh: $*" >&2; exit 2; }

case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | head -n -1; exit ;;
  "" | -*) die "expected a folder, found '${1:-}': jupyterhub/install.sh /opt/dlojz" ;;
esac
course=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $(realpath -m -- "$1") in # which scripts, configurations and a unit have in them
  *[!A-Za-z0-9/._+-]*) die "expected a folder of letters, digits and / . _ + -, such as /opt/dlojz; found '$(realpath -m -- "$1")'" ;;
esac
umask 022 # what is installed is for everybody to read
mkdir -p "$1" && folder=$(cd "$1" && pwd) || die "no folder $1: expected one that you may write to"

if [ "$(id -u)" = 0 ]; then # for other users: each folder above must let them pass
  parent=$folder
  while [ "$parent" != / ]; do
    case $(stat -c %A "$parent") in
      *x | *t) ;;
      *) die "$parent is closed to other users: choose another folder, such as /opt/dlojz" ;;
    esac
    parent=$(dirname "$parent")
  done
fi

# Debian's own Python. One from pyenv or conda often lies in a private home (0700), and a server of
# another user then ends with "Permission denied", because a venv only links to it.
python=${PYTHON:-/usr/bin/python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  die "Python 3.11 or later is needed, $("$python" --version 2>&1) was found: PYTHON=/usr/bin/python3.12 $0 $1"
"$python" -c 'import ensurepip, venv' 2>/dev/null || die "no venv: apt-get install python3-venv"
command -v npm >/dev/null || die "no npm: apt-get install npm"

echo "installing into $folder: the first time that takes some minutes"
env=$folder/env
[ -x "$env/bin/python" ] || "$python" -m venv "$env"
"$env/bin/python" -m pip install -q -q --disable-pip-version-check -c "$course/constraints.txt" uv
# From a copy: a build in the clone leaves files behind, and would pack those of an earlier build.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$course"/{pyproject.toml,README.md,LICENSE,dlojz} "$copy"
"$env/bin/uv" pip install -q --python "$env/bin/python" --compile-bytecode \
  -c "$course/constraints.txt" --reinstall-package dlojz "$copy[hub]"
install -D -m 644 "$course/jupyterhub/server.py" "$env/share/dlojz/server.py"
install -D -m 644 "$course/tools/overrides.json" "$env/share/jupyter/lab/settings/overrides.json"
# A terminal is a login shell, so that it has what the site sets in /etc/profile, such as `module`;
# but that also replaces PATH. A new terminal begins in the course, or where its launcher was.
cat >"$env/etc/jupyter/jupyter_server_config.json" <<END
{"ServerApp": {"terminado_settings": {"shell_command": ["bash", "-lc",
  "PATH=$env/bin:\$PATH; [[ ! . -ef ~ ]] || cd dlojz 2>/dev/null; exec \${SHELL:-bash}"]}}}
END
# Otherwise each page that is opened has the server start Node.js, to see if JupyterLab is to be built.
install -m 644 "$course/tools/page_config.json" "$env/share/jupyter/lab/settings/page_config.json"

proxy=configurable-http-proxy@5.3.0
npm install --silent --no-audit --no-fund --prefix "$folder/proxy" "$proxy" >/dev/null ||
  die "npm could not install $proxy: its message is above, or see: npm install --prefix $folder/proxy $proxy"

if [ -z "${DLOJZ_DATA:-}" ] && [ ! -e "$folder/data" ]; then
  # As a whole or not at all: trainees must never find half a data set.
  rm -rf "$folder/.data" && (cd "$course" && "$env/bin/dlojz" data "$folder/.data" >/dev/null)
  mv "$folder/.data" "$folder/data"
fi
# Git refuses a repository of another user, such as the course's own copy here, unless it is declared
# safe; and of all configurations it believes only the system's in this. Servers use this one.
# A notebook merged line by line may be broken JSON, and a trainer a mixture that runs: if both sides
# changed one, an update keeps the trainee's whole (-merge, with nbgitpuller's -Xours).
rm -f "$folder/gitconfig"
declare_git() { git config --file "$folder/gitconfig" --add "$@"; }
declare_git include.path /etc/gitconfig
for safe in "$folder/course.git" "$course" "$course/.git"; do declare_git safe.directory "$safe"; done
declare_git core.attributesFile "$folder/gitattributes"
printf '%s -merge\n' '*.ipynb' dlojz/dlojz.py repair.py >"$folder/gitattributes"

# The machine's queue of jobs belongs to root: whoever makes the folder may remove the tickets of
# others in it, and the default, /tmp/dlojz-queue, is made by the first who submits.
mkdir -p "$folder/queue" && chmod 1777 "$folder/queue"

# Read-only for trainees, even if a package came with a private or a group-writable file.
chmod -R a+rX,go-w "$env" "$folder/proxy"
[ ! -e "$folder/data" ] || chmod -R a+rX,go-w "$folder/data"
echo "$folder is ready"
