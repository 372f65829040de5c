#!/usr/bin/env bash
# Makes .venv at the repository root with what the examples and submit.py need (torch, numpy, pyyaml). Run it as often as
# you like: the second run takes a moment, and one that follows an interrupted run starts afresh.
#
#   scripts/setup_env.sh [--tests]
#
#   --tests             also what scripts/test.sh needs (pytest, pytest-xdist, ruff, mypy, pyyaml, submitit)
#   PYTHON=python3.12   the Python to use; without it the first one >= 3.10 that is found
#   PIP_TORCH_SPEC=...  the torch to install, e.g. torch==2.7.1; without it the range in pyproject.toml
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
state=$venv/.setup_env # what is installed, one line each; empty while an installation is under way
cpu_index=https://download.pytorch.org/whl/cpu

say() { printf 'setup_env: %s\n' "$*"; }
die() {
    printf 'setup_env: error: %s\n' "$*" >&2
    exit 1
}

case "${1-}" in
    '' | --tests) with_tests=${1:+yes} ;;
    *)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        [ "$1" = --help ] || die "unknown argument '$1'"
        exit 0
        ;;
esac
unset PYTHONPATH PYTHONHOME # packages found there must not count as installed

find_python() {
    if [ -n "${PYTHON-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.14 python3.13 python3.12 python3.11 python3.10
    fi
    local candidate
    for candidate; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python >= 3.10 found (tried: $*). Install one, or load its module, or name it: PYTHON=/path/to/python3 $0"
}

make_venv() {
    local version
    if [ -e "$venv" ] && [ ! -e "$state" ] && [ -n "$(ls -A "$venv")" ]; then
        die "$venv was not made by this script. Move it away or delete it, then run this again."
    fi
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        die "$python cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python$version-venv"
    fi
    say "making $venv with $python (Python $version)"
    if [ -d "$venv" ]; then find "$venv" -mindepth 1 -maxdepth 1 ! -path "$state" -exec rm -rf {} +; fi
    mkdir -p "$venv"
    : >"$state"
    "$python" -m venv "$venv"
}

# The requirements of pyproject.toml, one a line: the dependencies for the name "torch", else the extra of that name.
requirements() {
    "$venv/bin/python" - "$root/pyproject.toml" "$@" <<'PY'
import sys
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
for name in sys.argv[2:]:
    print(*(project["dependencies"] if name == "torch" else project["optional-dependencies"][name]), sep="\n")
PY
}

pip_install() {
    local quiet=--quiet
    if [ -t 1 ]; then quiet=--progress-bar=on; fi # a person may want to see how far a long download is
    "$venv/bin/python" -m pip install "$quiet" --no-input --disable-pip-version-check "$@"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
is_login_node() { timeout 10 sinfo --noheader || timeout 10 qstat -B; } >/dev/null 2>&1

# The default torch for Linux is several gigabytes of CUDA, of no use to a laptop without a GPU.
prefer_cpu_torch() {
    if [ -n "${PIP_TORCH_SPEC-}" ] || [ "$(uname -s)" != Linux ] || has_nvidia_gpu; then return; fi
    if [ -e /dev/kfd ]; then
        say "AMD GPUs need a torch of their own. Use the site's module, or after this: $venv/bin/python -m pip install" \
            "--force-reinstall torch --index-url https://download.pytorch.org/whl/rocmVERSION"
    fi
    if is_login_node; then
        say "no NVIDIA GPU here, but a scheduler answers: taking the default build of $torch, for the compute nodes"
        return
    fi
    say "no NVIDIA GPU found: taking the CPU build of $torch from $cpu_index"
    if ! pip_install --no-deps --retries 1 --timeout 15 --index-url "$cpu_index" "$torch"; then
        say "that did not work: taking the default build"
    fi
}

# Two runs at the same time, say of demo.sh and test.sh, wait for each other.
if command -v flock >/dev/null; then
    exec 9<"$root/pyproject.toml"
    flock 9
fi

made="made $venv"
if [ ! -s "$state" ] || [ "$(head -n 1 "$state")" != "$made" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    make_venv
fi

torch=${PIP_TORCH_SPEC:-$(requirements torch)}
extras=$(requirements examples submit ${with_tests:+test dev submitit})
wanted=("$torch")
while read -r line; do wanted+=("$line"); done <<<"$extras"
missing=()
for line in "${wanted[@]}"; do
    if ! grep -qxF -- "$line" "$state"; then missing+=("$line"); fi
done

if [ ${#missing[@]} -eq 0 ]; then
    say "$venv is ready"
    exit 0
fi

kept=$(tail -n +2 "$state" | grep -v '^torch' || true)
: >"$state"
if [ "${missing[0]}" = "$torch" ]; then
    if [ -z "${PIP_TORCH_SPEC-}" ]; then say "for another torch: PIP_TORCH_SPEC=torch==VERSION $0"; fi
    prefer_cpu_torch
fi
say "installing ${missing[*]}"
pip_install "$torch" "${missing[@]}"
{
    printf '%s\n' "$made"
    printf '%s\n' "${wanted[@]}" "$kept" | sort -u | sed "/^$/d"
} >"$state.new"
mv "$state.new" "$state"
say "$venv is ready"
