# What every job script needs once it has found the kit: the Python to use, and arguments out of one text.
# Sourced by the job scripts in this folder. Not here: how ranks are started (scripts/launch.py).
# shellcheck shell=bash

python_at_start=$(type -P python3 || true)

# The Python for the training: the one named by PYTHON, one that the job's set-up lines brought, that of an environment
# that was active when the job was submitted, the kit's own (scripts/setup_env.sh makes it), or whatever is there.
find_python() {
    local here candidate
    here=$(type -P python3 || true)
    if [ -n "${PYTHON-}" ]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    if [ "$here" != "$python_at_start" ]; then
        printf '%s\n' "$here"
        return
    fi
    # PBS passes PBS_O_PATH instead of PATH, and VIRTUAL_ENV only if it was told to.
    candidate=$(PATH=${PBS_O_PATH-} type -P python3 || true)
    if [ "${candidate%/*}" = /usr/bin ] || [ "$candidate" = "$here" ]; then candidate=; fi
    for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" \
        "$candidate" "$KIT/.venv/bin/python"; do
        if [ -x "$candidate" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    printf '%s\n' "${here:-python3}"
}

# split TEXT: sets the array `words` to the words of the text, which may be quoted as for a shell; nothing is expanded.
split() {
    # shellcheck disable=SC2034 # the job scripts read it
    mapfile -d '' -t words < <(xargs printf '%s\0' <<<"$1")
}
