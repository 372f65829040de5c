"""qsub: its options and directives, and what of the submitter's environment goes with the job."""
from __future__ import annotations

import getopt
import html
import os
import pwd
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from tests.cluster.pbs_standin.resources import Refused

USAGE = """\
usage: qsub [-a date_time] [-A account_string] [-c interval]
\t[-C directive_prefix] [-e path] [-f ] [-h ] [-I [-X]] [-j oe|eo] [-J X-Y[:Z]]
\t[-k keep] [-l resource_list] [-m mail_options] [-M user_list]
\t[-N jobname] [-o path] [-p priority] [-P project] [-q queue] [-r y|n]
\t[-R o|e|oe] [-S path] [-u user_list] [-W otherattributes=value...]
\t[-v variable_list] [-V ] [-z] [script | -- command [arg1 ...]]
       qsub --version
"""
LETTERS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
VALID = {
    "-j": r"oe|eo|n", "-k": r"n|[oe]{1,2}d?|d[oe]{1,2}", "-m": r"n|[abej]+", "-r": r"[yn]", "-R": r"[oe]{1,2}",
    "-p": r"[+-]?(\d{1,3}|10[01]\d|102[0-3])", "-J": r"\d+-\d+(:\d+)?(%\d+)?", "-N": r"[^\s/]+", "-S": r"/.*",
}
CONDITIONS = ("afterok", "afternotok", "afterany")
W_NAMES = ("block", "depend", "umask", "group_list")
LONGEST_NAME = 230


def wrong_use(text: str) -> Refused:
    return Refused(2, f"{text}\n{USAGE}")


def options(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    if words[:1] and words[0].startswith("--") and words[0] != "--":
        raise wrong_use("invalid option -- '-'")
    try:
        found, rest = getopt.getopt(words, LETTERS)
    except getopt.GetoptError as error:
        kind = "option requires an argument" if "requires" in error.msg else "invalid option"
        raise wrong_use(f"{kind} -- '{error.opt}'") from None
    for name, value in found:
        if name == "-N" and len(value) > LONGEST_NAME:
            raise Refused(2, "Job name is too long ")
        ascending = name != "-J" or re.fullmatch(VALID["-J"], value) and (
            int(re.split(r"\D", value)[0]) < int(re.split(r"\D", value)[1]))
        if name in VALID and not (re.fullmatch(VALID[name], value) and ascending):
            raise wrong_use(f"illegal {name} value")
    return found, rest


def directives(script: str) -> list[str]:
    """The words of the #PBS lines before the first command."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#PBS"):
            lexer = shlex.shlex(line.removeprefix("#PBS"), posix=True)
            lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", "#"
            words += lexer
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def split(text: str, keep_quotes: bool = False) -> list[str]:
    """Split at commas that are not quoted or escaped. Quotes are eaten; Refused where one is not closed."""
    parts, quote, escaped = [""], "", False
    for letter in text:
        if escaped:
            parts[-1], escaped = parts[-1] + letter, False
        elif letter == "\\" and not keep_quotes:
            escaped = True
        elif letter in ("'", '"') and quote in ("", letter):
            quote = "" if quote else letter
            parts[-1] += letter if keep_quotes else ""
        elif letter == "," and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if quote:
        raise Refused(1, "cannot send environment with the job")
    return parts


def variables(found: dict[str, str]) -> dict[str, str]:
    """Variable_List, without what the server adds."""
    result = {f"PBS_O_{name}": os.environ[name] for name in ("HOME", "LANG", "LOGNAME", "PATH", "MAIL", "SHELL", "TZ")
              if name in os.environ}
    result |= {"PBS_O_INTERACTIVE_AUTH_METHOD": "resvport", "PBS_O_INTERACTIVE_ENCRYPT_METHOD": "",
               "PBS_O_WORKDIR": os.environ.get("PWD", os.getcwd()), "PBS_O_SYSTEM": "Linux"}
    for part in split(found["-v"]) if found.get("-v") else []:
        name, equals, value = part.partition("=")
        if not equals and name not in os.environ:
            raise Refused(1, "cannot send environment with the job")
        result[name] = value if equals else os.environ[name]
    if "-V" in found:  # it comes after -v, whose values it replaces
        result |= {name: value for name, value in os.environ.items() if not name.startswith("PBS_O_")}
    return result


def other_attributes(text: str) -> dict[str, str]:
    """-W umask=022,depend=afterok:1:2,block=true"""
    result: dict[str, str] = {}
    for part in split(text):
        name, equals, value = part.partition("=")
        if name == "depend" or not equals and "depend" in result:  # depend=afterok:1,afterany:2
            condition, *jobs = (value if equals else part).split(":")
            if condition not in CONDITIONS or not jobs or not all(re.match(r"\d", job) for job in jobs):
                raise wrong_use("illegal -W value")
            result["depend"] = f"{result['depend']},{part}" if not equals else value
        elif not equals:
            raise wrong_use("illegal -W value")
        elif name not in W_NAMES:
            raise Refused(70, f"-W {name} is not part of this stand-in for PBS")
        else:
            result[name] = value
    if "group_list" in result:
        raise Refused(197, "Bad GID for job execution")
    return result


def request(words: list[str]) -> dict[str, Any]:
    """What is sent to the server."""
    given, rest = options(words)
    command = None
    if "--" in words and words[len(words) - len(rest) - 1:][:1] == ["--"]:
        command, script, name = rest, "", Path(rest[0]).name
    elif rest and rest != ["-"]:
        if len(rest) > 1:
            raise Refused(2, USAGE)
        try:
            script = Path(rest[0]).read_bytes().decode(errors="surrogateescape")
        except OSError as error:
            raise Refused(1, f"script file:: {error.strerror}") from None
        name = Path(rest[0]).name
    else:
        script, name = sys.stdin.read(), "STDIN"
    if "\r\n" in script:
        raise Refused(1, "script contains cr, lf")
    in_script, _ = options(directives(script))
    found: dict[str, str] = {}
    resources: dict[str, str] = {}
    attributes: dict[str, str] = {}
    for letter, value in [*in_script, *given]:  # the command line wins, resource by resource
        if letter == "-l":
            for part in split(value, keep_quotes=True):
                key, _, requested = part.partition("=")
                resources[key] = requested
        elif letter == "-W":
            attributes |= other_attributes(value)
        else:
            found[letter] = value
    for letter in ("-a", "-c", "-C", "-I", "-u", "-X"):
        if letter in found:
            if letter == "-I" and not sys.stdin.isatty():
                raise Refused(1, "\tstandard input and output must be a terminal for\n\tinteractive job submission")
            raise Refused(70, f"{letter} is not part of this stand-in for PBS")
    user = pwd.getpwuid(os.getuid())
    depend: dict[str, list[str]] = {}
    for part in attributes.get("depend", "").split(",") if "depend" in attributes else []:
        condition, *jobs = part.split(":")
        depend.setdefault(condition, []).extend(jobs)
    result = {
        "do": "submit", "user": user.pw_name, "uid": user.pw_uid, "gid": user.pw_gid, "home": user.pw_dir,
        "login_shell": user.pw_shell, "host": socket.gethostname(), "workdir": os.environ.get("PWD", os.getcwd()),
        "name": found.get("-N", name), "queue": found.get("-q", ""), "resources": resources,
        "variables": variables(found), "output": destination(found.get("-o", "")),
        "error": destination(found.get("-e", "")), "join": found.get("-j", "n"), "keep": found.get("-k", "n"),
        "account": found.get("-A", ""), "project": found.get("-P", "_pbs_project_default"),
        "priority": str(int(found.get("-p", 0))), "rerunnable": found.get("-r") != "n", "hold": "-h" in found,
        "array": found.get("-J", ""), "shell": found.get("-S", ""), "remove": found.get("-R", ""),
        "mail_points": found.get("-m", "a"), "mail_users": found.get("-M", ""), "depend": depend,
        "umask": attributes.get("umask", ""), "block": attributes.get("block") == "true",
        "arguments": " ".join(words), "silent": "-z" in found,
    }
    if command is None:
        return {**result, "script": script}
    tag = "jsdl-hpcpa"
    return {**result, "command": command,
            "executable": f"<{tag}:Executable>{xml(command[0])}</{tag}:Executable>",
            "argument_list": "".join(f"<{tag}:Argument>{xml(word)}</{tag}:Argument>" for word in command[1:])}


def xml(text: str) -> str:
    return html.escape(text, quote=False).replace('"', "&quot;").replace("'", "&apos;")


def destination(path: str) -> str:
    """A path of -o or -e, "host:" taken off, made absolute; with a slash at the end where it is a folder."""
    if not path:
        return ""
    path = path.partition(":")[2] if re.match(r"[\w.-]+:", path) else path
    absolute = os.path.join(os.environ.get("PWD", os.getcwd()), path)
    return absolute + "/" if os.path.isdir(absolute) and not absolute.endswith("/") else absolute

