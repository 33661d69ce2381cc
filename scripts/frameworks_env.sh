#!/usr/bin/env bash
# Readies ./.venv-frameworks for `make test-frameworks`: the frameworks that zerox.integrations is for (extra "frameworks"
# of pyproject.toml, versions in constraints.txt), beside torch and zerox of the environment that setup_env.sh readies.
# Prints its python on stdout and everything else on stderr. Quick where nothing is left to do.
#
# It sees the other environment's packages through a .pth file, so torch is not fetched again: half a minute and 0.4 GB,
# where a second torch takes 0.9 GB more, or several GB with CUDA. The other environment is never changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "zerox: $*" >&2; }
die() { say "$*"; exit 1; }

base="$(scripts/setup_env.sh test)"
folder="$PWD/.venv-frameworks"
py="$folder/bin/python"
packages="$("$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
link="import site; site.addsitedir('$packages')" # also reads the .pth files there, as that of an editable zerox

[[ "$packages" != "$folder"/* ]] || die "ZEROX_ENV is $folder, which is made from another environment: leave ZEROX_ENV out"
if [[ ! -x "$py" ]] || [[ "$(cat "$folder/base" 2>/dev/null)" != "$link" ]] || ! "$py" -m pip --version >/dev/null 2>&1; then
    say "making $folder beside $packages"
    "$base" -m venv --clear --without-pip "$folder" >&2 || die "could not make $folder, see above"
    own="$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$link" >"$own/zerox_base.pth"
    echo "$link" >"$folder/base"
fi

ZEROX_ENV="$folder" scripts/setup_env.sh --no-build frameworks
