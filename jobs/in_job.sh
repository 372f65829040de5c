# What every job script does once it has found the kit, whose folder is $KIT. The job scripts source this file.
# shellcheck shell=bash

KIT=$(cd -- "$KIT" >/dev/null && pwd)
DDPKIT_PYTHON_AT_START=$(type -P python3 || true) # another one, which the set-up lines bring, is preferred
export DDPKIT_PYTHON_AT_START

# Replace this shell by a command of the kit: it receives each signal once, and its exit status is the job's.
run() {
    local python package=$KIT/utils
    if [ ! -d "$package" ]; then package=$KIT; fi # as pip installs it
    set -u -o pipefail
    python=$(find_python)
    exec "$python" "$package" "$@"
}

# Print the path of a Python that can start the kit, which then chooses the one for the ranks; that one needs torch.
find_python() {
    local candidate submitted=
    if [ -n "${PBS_O_PATH-}" ]; then submitted=$(PATH=$PBS_O_PATH type -P python3 || true); fi
    for candidate in "${PYTHON-}" python3 "$KIT/.venv/bin/python" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" \
        "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" "$submitted"; do
        candidate=$(type -P -- "$candidate") || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 6))' </dev/null >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    printf 'job script: no Python was found on PATH, in %s/.venv or in an active environment. ' "$KIT" >&2
    printf 'Run %s/scripts/setup_env.sh, or load a Python module in the set-up lines.\n' "$KIT" >&2
    return 1
}

# Define the command `module` where the shell that submitted the job could not pass it on, as csh cannot.
find_modules() {
    local file
    for file in "${LMOD_PKG-}/init/bash" "${MODULESHOME-}/init/bash" /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
        if type module >/dev/null 2>&1; then return; fi
        # shellcheck disable=SC1090 # a file of the site
        if [ -r "$file" ]; then . "$file" || true; fi
    done
}

# Set the array `words` to the words of ARGS, which are quoted as for a shell. Nothing in ARGS is expanded or run.
split_ARGS() {
    local python with_words='qsub OPTIONS -- /path/to/this/script train.py --epochs 3'
    # "qsub -v ARGS" makes a backslash of each quote, and drops what follows a comma between quotes.
    if [[ $ARGS == *\\* ]]; then
        printf 'job script: ARGS is %s. qsub changes quotes and backslashes in ARGS, and the words cannot be ' "$ARGS" >&2
        printf 'recovered. Expected words without them. Submit with: %s\n' "$with_words" >&2
        exit 2
    fi
    python=$(find_python)
    mapfile -d '' -t words < <("$python" -c '
import os, shlex, sys
try:
    words = shlex.split(sys.argv[1])
except ValueError as error:
    sys.exit(f"job script: ARGS is {sys.argv[1]!r}: {error}. Expected words quoted as for a shell. Correct the quotes.")
sys.stdout.buffer.write(b"".join(os.fsencode(word) + b"\0" for word in words))' "$ARGS")
    wait "$!" || exit 2
    if [ -z "${words[0]-}" ]; then
        printf 'job script: there is nothing to run: ARGS is %s, and the script has no arguments. ' "${ARGS:-empty or not set}" >&2
        printf 'qsub passes ARGS by the "#PBS -v" line of the script, which "qsub -v" replaces, and "qsub -V" passes ' >&2
        printf 'nothing in OpenPBS v23.06.06. Submit with: env ARGS="train.py --epochs 3" qsub OPTIONS /path/to/this/script, ' >&2
        printf 'or with: %s\n' "$with_words" >&2
        exit 2
    fi
}

# PBS signals every process of a job's first session. A login shell that ends at USR1 or TERM ends the job at once, before
# ranks can save. "#PBS -v ...,BASH_ENV=..." prevents that, unless "qsub -v", a profile, or "qsub -V" with BASH_ENV in
# the environment (set by Lmod) replaces its value. This reports it; a script cannot change the shell around it.
check_login_shell() {
    local session name mask arguments handled=0
    case ${BASH_ENV-} in *.survive*) unset BASH_ENV ;; esac # it was for that shell
    if [ "${PBS_ENVIRONMENT-}" != PBS_BATCH ] || [ ! -r "/proc/$PPID/status" ]; then return; fi
    session=$(sed 's/.*) //' "/proc/$$/stat" | cut -d ' ' -f 4)
    arguments=$(tr '\0' ' ' <"/proc/$PPID/cmdline")
    # Under "qsub --" there is no login shell.
    if [ "$session" != "$PPID" ] || [ "${arguments#-}" = "$arguments" ]; then return; fi
    while read -r name mask; do
        case $name in SigIgn: | SigCgt:) handled=$((handled | 16#$mask)) ;; esac
    done <"/proc/$PPID/status"
    if [ $((handled & 0x4200)) -eq $((0x4200)) ]; then return; fi # 10 is USR1, 15 is TERM
    printf 'job script: warning: the login shell of this job (%s) ends at USR1 and TERM (qsig, qdel, time limit), and ' \
        "${arguments% }" >&2
    printf 'the job with it: ranks cannot save then. Expected a shell that ignores them; BASH_ENV is %s. ' \
        "${BASH_ENV:-not set}" >&2
    printf 'Add "trap : USR1 TERM" to ~/.bash_profile, or submit without -v and -V, or with: ' >&2
    printf 'qsub OPTIONS -- /path/to/this/script ARGUMENTS\n' >&2
}

check_login_shell
set +u +o pipefail # modules and environments are seldom written for these
find_modules
