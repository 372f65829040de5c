#!/usr/bin/env bash
# Makes .venv in the repository with the packages that the examples and ddpkit submit need (torch, numpy, pyyaml) and
# ddpkit. It may be run again: a .venv that is complete and can import ddpkit and torch is left as it is, and an
# interrupted installation is repeated. The last lines name the build of torch.
#
#   scripts/setup_env.sh [--tests]
#
#   --tests             also install what scripts/test.sh needs (pytest, ruff, mypy, submitit, ...)
#   PYTHON=python3.12   use this Python (default: the first one from 3.10 on)
#   PIP_TORCH_SPEC=...  install this torch, for example torch==2.8.0 (default: the range in pyproject.toml)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
state=$venv/.setup_env # installed packages, one line each; empty during an installation
cpu_index=https://download.pytorch.org/whl/cpu

print_status() { printf 'setup_env: %s\n' "$*"; }
die() {
    printf 'setup_env: error: %s\n' "$*" >&2
    exit 1
}

case "$*" in
    '' | --tests) with_tests=${1:+yes} ;;
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    *) die "the arguments are '$*'. Expected --tests, or none. See: $0 --help" ;;
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
    die "no Python >= 3.10 found (tried: $*). Install one, load its module, or name it: PYTHON=/path/to/python3 $0"
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
    print_status "making $venv with $python (Python $version)"
    if [ -d "$venv" ]; then find "$venv" -mindepth 1 -maxdepth 1 ! -path "$state" -exec rm -rf {} +; fi
    mkdir -p "$venv"
    : >"$state"
    "$python" -m venv "$venv"
}

# Print requirements of pyproject.toml, one a line: "torch" stands for the dependencies, other names for extras.
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
    local pip=("$venv/bin/python" -m pip install --no-input --disable-pip-version-check)
    if [ -t 1 ]; then
        "${pip[@]}" --progress-bar=on "$@"
    else # only the downloads that take a while
        "${pip[@]}" --progress-bar=off "$@" | sed -n 's/^ *\(Downloading .* [MG]B)\)/setup_env: \1/p'
    fi
}

# Print what was installed, as "torch 2.13.0 for CUDA 12.8"; fail where ddpkit or torch cannot be imported.
describe_torch() {
    (
        cd / # where no folder is called torch or ddpkit
        "$venv/bin/python" - <<'PY'
import ddpkit, torch
version = torch.version
kinds = ("CUDA", version.cuda), ("ROCm", version.hip), ("XPU", getattr(version, "xpu", None))
build = next((f"{kind} {number}" for kind, number in kinds if number), "CPUs only")
print(f"torch {torch.__version__} for {build}")
PY
    )
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
is_login_node() { timeout 10 sinfo --noheader || timeout 10 qstat -B; } >/dev/null 2>&1

# The default torch for Linux brings several gigabytes of CUDA, which a laptop without a GPU cannot use.
prefer_cpu_torch() {
    if [ -n "${PIP_TORCH_SPEC-}" ] || [ "$(uname -s)" != Linux ] || has_nvidia_gpu; then return; fi
    if [ -e /dev/kfd ]; then
        print_status "AMD GPUs need another torch. Use the module of the site, or run after this: $venv/bin/python -m pip install" \
            "--force-reinstall torch --index-url https://download.pytorch.org/whl/rocmVERSION"
    fi
    if is_login_node; then
        print_status "no NVIDIA GPU on this host, but a scheduler responds: taking the default build of $torch, for the compute nodes"
        return
    fi
    print_status "no NVIDIA GPU found: asking for the CPU build of $torch from $cpu_index"
    asked_for_cpu=yes
    if ! pip_install --no-deps --retries 1 --timeout 15 --index-url "$cpu_index" "$torch"; then
        print_status "the installation failed: taking the default build"
    fi
}

# Simultaneous runs, for example of demo.sh and test.sh, wait for each other.
if command -v flock >/dev/null; then
    exec 9<"$root/pyproject.toml"
    flock 9
fi

made="made $venv"
if [ ! -s "$state" ] || [ "$(head -n 1 "$state")" != "$made" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    make_venv
fi

torch=${PIP_TORCH_SPEC:-$(requirements torch)}
extras=$(requirements examples tools ${with_tests:+test dev submitit plot})
wanted=("$torch")
while read -r line; do wanted+=("$line"); done <<<"$extras"
wanted+=("--editable=$root") # the command ddpkit
missing=()
for line in "${wanted[@]}"; do
    if ! grep -qxF -- "$line" "$state"; then missing+=("$line"); fi
done

# What $state says is believed only as far as it can be imported.
if [ -s "$state" ] && [ "${missing[0]-}" != "$torch" ] && ! build=$(describe_torch 2>/dev/null); then
    print_status "$venv cannot import ddpkit and torch: installing what is missing again"
    missing+=("--editable=$root")
    if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        "$venv/bin/python" -m pip uninstall --quiet --yes torch
        missing=("$torch" "${missing[@]}")
    fi
fi

ready="$venv is ready: source $(printf '%q' "$venv/bin/activate")"
if [ ${#missing[@]} -eq 0 ]; then
    print_status "$build"
    print_status "$ready"
    exit 0
fi

kept=$(tail -n +2 "$state" | grep -v '^torch' || true)
: >"$state"
if [ "${missing[0]}" = "$torch" ]; then
    print_status "torch alone may take minutes"
    if [ -z "${PIP_TORCH_SPEC-}" ]; then print_status "for another torch: PIP_TORCH_SPEC=torch==VERSION $0"; fi
    prefer_cpu_torch
fi
print_status "installing ${missing[*]}"
pip_install "$torch" "${missing[@]}" "--editable=$root" ||
    die "pip could not install this, see above. Correct PIP_TORCH_SPEC if it is set; on a host without internet set" \
        "HTTPS_PROXY or PIP_INDEX_URL, or use a login node. Then run this again."
{
    printf '%s\n' "$made"
    printf '%s\n' "${wanted[@]}" "$kept" | sort -u | sed "/^$/d"
} >"$state.new"
build=$(describe_torch) || die "$venv cannot import ddpkit and torch, see above. Delete it, then run this again."
mv "$state.new" "$state"
print_status "$build"
case $build in
    *CUDA*) if [ -n "${asked_for_cpu-}" ]; then
        print_status "pip took this build, and not that of $cpu_index, from another index: pip config list"
    fi ;;
esac
print_status "$ready"
