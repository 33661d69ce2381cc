#!/usr/bin/env bash
# Makes a fresh Debian in a folder, and runs README's commands in it as a new user would: a plain user, a clone, and the
# packages that README names. Needs root, and debootstrap from apt.
#
#   scripts/fresh_machine.sh bookworm|trixie [COMMAND...]      default: 'make demo' 'make test'
#
# What is tried is the last commit. The new machine has this one's network, package mirror and pip's configuration, and a
# name that does not resolve, as in many containers. MAX_JOBS, WORKERS, ARGS and the ZEROX_* variables reach the commands.
#
# ZEROX_FRESH_ROOT   the folder; default: /var/tmp/zerox-fresh/RELEASE. Kept, so a second run begins where the user does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGES=(git g++ make python3-dev python3-venv) # as README has them
USER_NAME=newcomer

say() { echo "zerox: $*" >&2; }
die() { say "$*"; exit 1; }

release="${1:-}"
[[ "$release" == bookworm || "$release" == trixie ]] || die "fresh_machine.sh bookworm|trixie [COMMAND...]"
shift
if (($# == 0)); then set -- 'make demo' 'make test'; fi
((EUID == 0)) || die "fresh_machine.sh makes a Debian root, which takes root: sudo $0 $release"
command -v debootstrap >/dev/null || die "debootstrap is missing: apt-get install debootstrap"
root="${ZEROX_FRESH_ROOT:-/var/tmp/zerox-fresh/$release}"
home="/home/$USER_NAME"

# A mount, process and host name namespace of its own: when the script ends, however it ends, nothing is left mounted or
# running, and the folder can be removed.
if [[ -z "${ZEROX_FRESH_INSIDE:-}" ]]; then
    export ZEROX_FRESH_INSIDE=1
    exec unshare --mount --uts --pid --fork --kill-child --propagation private "$0" "$release" "$@"
fi
unset ZEROX_FRESH_INSIDE
trap 'exit 130' INT TERM # the first process of a namespace has no other end by a signal than this or SIGKILL

inside() { chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
    HOME=/root DEBIAN_FRONTEND=noninteractive "${proxies[@]}" "$@"; }

proxies=()
for name in http_proxy https_proxy no_proxy; do
    if [[ -n "${!name:-}" ]]; then proxies+=("$name=${!name}"); fi
done

# ---- a Debian, from the mirror that this machine uses
if [[ ! -e "$root/etc/zerox-fresh" ]]; then
    mirror="$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 2>/dev/null | sed -n 's/^Debian //p' | head -n 1)" || true
    say "making a Debian $release in $root"
    mkdir -p "$root"
    debootstrap --variant=minbase "$release" "$root" ${mirror:+"$mirror"} >"$root.log" 2>&1 || die "debootstrap failed, see $root.log"
    touch "$root/etc/zerox-fresh"
fi
mkdir -p "$root/dev/shm"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
echo "127.0.0.1 localhost" >"$root/etc/hosts"
hostname "fresh-$release"
apt-config dump | grep -E '^Acquire::[a-z]+::Proxy ' >"$root/etc/apt/apt.conf.d/99host" || true
if ! inside dpkg -s "${PACKAGES[@]}" >/dev/null 2>&1; then
    say "installing ${PACKAGES[*]}"
    { inside apt-get update -q && inside apt-get install -q -y --no-install-recommends "${PACKAGES[@]}"; } >"$root.log" 2>&1 ||
        die "apt-get failed, see $root.log"
fi

# ---- the package registry, as pip has it here: its settings, and the local folders and files that they name
python3 -m pip config list | sed -nE "s/^[^=]*\.([a-z-]+)='(.*)'$/\1 = \2/p" | sort -u | {
    echo "[global]"
    grep -Ev '^(user|target|prefix|require-virtualenv) ' || true
} >"$root/etc/pip.conf"
for word in $(sed -n 's/^[^=]* = //p' "$root/etc/pip.conf"); do
    case "$word" in
        file://*) place="$(dirname "${word#file://}")" ;; # an index: its files lie beside it
        /*) place="$word" ;;
        *) continue ;;
    esac
    if [[ -d "$place" ]]; then
        mkdir -p "$root$place"
    else
        [[ -f "$place" ]] || continue
        install -D /dev/null "$root$place"
    fi
    mount --bind "$place" "$root$place"
    mount -o remount,bind,ro "$root$place"
done

# ---- a user and a clone; ./.venv and what was built stay from an earlier run
inside id -u "$USER_NAME" >/dev/null 2>&1 || inside useradd --create-home --shell /bin/bash "$USER_NAME"
commit="$(git rev-parse HEAD)"
[[ -z "$(git status --porcelain --untracked-files=no)" ]] || say "what is not committed is not tried"
if [[ ! -d "$root$home/zerox" ]]; then git clone -q --no-local . "$root$home/zerox"; fi
git -c safe.directory='*' -C "$root$home/zerox" fetch -q "$PWD" HEAD
git -c safe.directory='*' -C "$root$home/zerox" checkout -q -f "$commit"
inside chown -R "$USER_NAME:" "$home/zerox"

variables=("HOME=$home" "USER=$USER_NAME" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 "${proxies[@]}")
for name in MAX_JOBS WORKERS ARGS "${!ZEROX_@}"; do
    if [[ -n "${!name:-}" ]]; then variables+=("$name=${!name}"); fi
done
as_user() { chroot --userspec="$USER_NAME" "$root" /usr/bin/env -i "${variables[@]}" bash -c "cd ~/zerox && $1" </dev/null; }

status=0
for command in "$@"; do
    say "$release, ${commit:0:7}: $command"
    start=$SECONDS
    if as_user "$command"; then result=passed; else result=FAILED status=1; fi
    versions="$(as_user 'echo "$(python3 -V), $(g++ --version | head -n 1), torch $(.venv/bin/python -c "
import importlib.metadata as m; print(m.version(\"torch\"))" 2>/dev/null)"')"
    say "$release, ${commit:0:7}: $command $result in $((SECONDS - start)) s ($versions)"
done
exit $status
