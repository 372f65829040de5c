"""Interpret the last lines of an output: the job's own end, and lines that mention an error."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .labels import split_labels

NUM_LINES = 200  # a job that prints more lines after a warning has survived it
_LINES_OF_END = 40  # searched for the program's end; epilogues come after it

# Words of schedulers and launchers about a job that has ended well.
_ENDED_WELL = re.compile(
    r"(?i)\bexit[_ ]?(?:status|code)\b\s*(?:is|of|[:=])?\s*0(?![\d.:])|\bexitcode[:= ]+0(?::0)?\b"
    r"|ExitCode=0:0|\bState: COMPLETED\b|^Successfully completed\."
)
# Words of programs at their end.
_SUBJECT = (
    r"(?:training|train|run|job|experiment|fine-?tuning|script|benchmark|program|pipeline"
    r"|pretraining|inference|everything|all (?:epochs|steps|ranks|jobs))"
)
_PROGRAM_ENDED = re.compile(
    rf"(?i)\b{_SUBJECT}\b[^.:;]{{0,40}}\b(?:completed?|finished|done|ended|over|success\w*)\b"
    r"|^\W*(?:completed?|finished|done|success(?:ful(?:ly)?)?|all done)\b"
    r"|`?max_(?:epochs|steps)=\d+`? reach|'train_runtime'|^Training time\b|^real\s+\d+m"
    r"|\bwandb: (?:Synced|Run summary|Find logs at|.*View run)"
    r"|\bfinal (?:\w+ )?(?:loss|accuracy|acc|checkpoint|model|result|metric|score|eval)"
    r"|\bsaved? (?:the )?(?:final|last|trained)\b|\bend of (?:job|run|training)\b"
)
_STEP = re.compile(r"(?i)\b(?:epoch|step|iter(?:ation)?|loss)\b")  # after it, the job goes on
_COUNTER = re.compile(
    r"(?i)\b(?:epochs?|steps?|iter(?:ation)?s?|batch(?:es)?)\b\W{0,3}(\d+)\s*(?:/|of)\s*(\d+)"
)
_FULL_BAR = re.compile(r"100%\|")

# Lines that mention an error. The first pattern describes errors that have ended many jobs.
_ERROR_WORDS = (
    re.compile(
        r"(?i)\b(?:errors?|fatal|refused|not found|denied|no such|panic|failed|failure|aborted"
        r"|abort|aborting|killed|crash(?:ed)?)\b|\w(?:Error|Exception)\b|(?-i:\bERR(?:NO)?\b)"
    ),
    re.compile(
        r"(?i)\b(?:cannot|can't|could not|couldn't|unable to|invalid|not permitted|not allowed"
        r"|unrecognized|unsupported|unreachable|timed out|timeout|expired|exceeded|not available"
        r"|unavailable|does not exist|doesn't exist|missing|unknown|mismatch|corrupt(?:ed)?|lost"
        r"|disconnected|terminated|rejected|forbidden|incompatible|undefined|illegal|not supported"
        r"|must be|expected|usage:)\b"
    ),
)
_NO_ERROR = re.compile(
    r"(?i)\b(?:no|0|zero|without|ignor\w+|any) (?:\w+ )?(?:errors?|failures?)\b"
    r"|\b(?:errors?|fail(?:ed|ures?)|lost|missing|timeout|killed|expected|mismatch)"
    r"(?:[_ ](?:rate|bar|correction|feedback|loss|metric|count|norm|term|mean|max))?['\"]?"
    r"(?: |\s*[=:]\s*)[\[(]?[-+]?[\d.]+"
    r"|\b(?:\w+_errors?|errors?_\w+|[-\w]*error[-_ ](?:rate|bar|file|log|handling|mode))\b"
    r"|--errors?\b|\bon[_ -]error\b|\b0 (?:failed|errors?)\b|\bTF_CPP|\btimeout[=:]"
)
_WARNING = re.compile(
    r"(?i)\bwarn(?:ing|ings|ed)?\b|^\[?W\d{4}\b|\bW \w+\.cpp|\bNCCL INFO\b|\bnotice:"
)
_NAMED_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)+[A-Z]\w*(?:: |$)")
_IN_TRACEBACK = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |:?$)")


def own_end(lines: Sequence[tuple[int, str]]) -> int:
    """Return the number of the line in which the job reports its own end; 0 if there is none.

    lines: the last lines of the output, each with its number.
    """
    found = 0
    for number, line in lines:
        message = split_labels(line).message
        if message.startswith("ddpkit submit: job ") and ": completed" in message:
            found = number
        elif "ddpkit" not in message and _ENDED_WELL.search(message):
            found = number
    if found:
        return found
    written = [(number, split_labels(line).message) for number, line in lines if line.strip()]
    for number, message in written[-_LINES_OF_END:]:
        if _PROGRAM_ENDED.search(message) and not _is_failure(message):
            found = number
        elif _STEP.search(message) and not message.startswith("wandb: "):
            found = 0
    for number, message in reversed(written[-5:]):
        counters = _COUNTER.findall(message)
        if counters:
            if all(int(done) == int(whole) > 0 for done, whole in counters):
                found = found or number
            break
    if written and _FULL_BAR.search(written[-1][1]):
        found = found or written[-1][0]
    return found


def _is_failure(message: str) -> bool:
    """Whether a line about an end reports a failure, or is the kit's."""
    return "ddpkit" in message or _ERROR_WORDS[0].search(message) is not None


def mentions_error(lines: Sequence[tuple[int, str]]) -> int:
    """Return the number of the first line that mentions an error; 0 if there is none.

    A clearer sign of a failure takes precedence; warnings come last.
    """
    best = (9, 0)
    for number, line in lines:
        message = split_labels(line).message
        if _NO_ERROR.search(message):
            continue
        for tier, words in enumerate(_ERROR_WORDS):
            if words.search(message):
                tier += 2 * (_WARNING.search(line) is not None)
                best = min(best, (tier, number))
                break
    return best[1]


def is_exception(message: str, *, in_traceback: bool) -> bool:
    """Whether a line, without labels, ends a traceback: "queue.Empty", "Timeout: x".

    in_traceback: whether it follows a traceback's lines. If not, the name must include its module.
    """
    return (_IN_TRACEBACK if in_traceback else _NAMED_EXCEPTION).match(message) is not None
