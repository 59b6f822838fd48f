# Finds or makes the Python environment; sourced by run_train.sh and run_tests.sh.
#
# The caller sets ROOT (this tree) and calls `find_environment [EXTRA]`, which sets PYTHON or exits with a message.
# The active environment is used when this tree is installed in it; otherwise .venv in the tree, which is made when
# missing and installed into again when pyproject.toml has changed. Messages go to stderr.

say() { echo "${0##*/}: $*" >&2; }
die() {
    say "$@"
    exit 1
}

# probe PYTHON EXTRA: exit 0 when this tree is installed there; prints the requirements that are missing.
probe() {
    "$1" -P - "$ROOT" "$2" <<'PY' 2>/dev/null
import importlib.metadata, importlib.util, re, sys, tomllib
from pathlib import Path

root, extra = Path(sys.argv[1]).resolve(), sys.argv[2]
importlib.metadata.version("disagmoe")
spec = importlib.util.find_spec("disagmoe")
if spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(root):
    sys.exit(1)
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
missing = []
for requirement in project["dependencies"] + (project["optional-dependencies"][extra] if extra else []):
    name = re.match(r"[\w.-]+", requirement)[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        missing.append(name)
print(*missing)
PY
}

# install PYTHON EXTRA: this tree, editable, with its requirements; without a line for each that is there already.
install() {
    local line
    "$1" -m pip --version >/dev/null 2>&1 || die "$1 has no pip; install it (python3 -m ensurepip) and start again"
    # From the root and by a relative path, because pip reads [ and ] in a path as extras.
    (cd "$ROOT" && "$1" -m pip install --disable-pip-version-check --editable ".${2:+[$2]}") |
        while read -r line; do [[ $line == "Requirement already"* ]] || echo "$line"; done >&2 ||
        die "the installation failed (see above); nothing was started"
}

# A Python >= 3.11 that can make environments, from what is on PATH.
find_python() {
    local name without_venv="" seen=""
    for name in python3 python3.11 python3.12 python3.13 python; do
        command -v "$name" >/dev/null 2>&1 || continue
        seen+=" $name ($("$name" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo "does not run"))"
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            # The interpreter itself, because a name on PATH may stand for another version tomorrow.
            PYTHON=$("$name" -c 'import sys; print(sys.executable)')
            return
        fi
        without_venv=$name
    done
    if [ -n "$without_venv" ]; then
        die "$without_venv lacks the venv module; install it (Debian, Ubuntu: apt install $without_venv-venv)," \
            "or activate an environment of your own and run: pip install -e $ROOT"
    fi
    die "needs Python >= 3.11 and found${seen:- none}; install one (Debian, Ubuntu: apt install python3.11" \
        "python3.11-venv; or conda create -n disagmoe python=3.11) so that it is on PATH, and start again"
}

# use_own_venv EXTRA: .venv in the tree.
use_own_venv() {
    local venv=$ROOT/.venv extra=$1 stamp wanted
    PYTHON=$venv/bin/python
    if [ -e "$PYTHON" ] && "$PYTHON" -c '' 2>/dev/null; then
        "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            die "$venv holds Python $("$PYTHON" -c 'import platform; print(platform.python_version())')," \
                "but 3.11 is needed; remove it (rm -r $venv) and start again"
    else
        find_python
        say "making an environment in $venv with $PYTHON"
        "$PYTHON" -m venv "$venv" >&2 || die "could not make $venv (see above)"
        PYTHON=$venv/bin/python
    fi
    stamp=$venv/.installed
    wanted=$(cksum <"$ROOT/pyproject.toml")
    if [ -f "$stamp" ] && grep -qxF "$wanted ${extra:-base}" "$stamp" && [ -z "$(probe "$PYTHON" "$extra" || echo none)" ]; then
        return
    fi
    say "installing this tree${extra:+ with what its tests need} into $venv (a few minutes and GB the first time)"
    install "$PYTHON" "$extra"
    # A line for each set of requirements that is known to be there.
    { grep -sF "$wanted " "$stamp" || true; } >"$stamp.new"
    printf '%s\n' "$wanted base" "$wanted ${extra:-base}" >>"$stamp.new"
    mv "$stamp.new" "$stamp"
}

find_environment() {
    local extra=${1:-} active missing
    active=$(command -v python || command -v python3 || true)
    if [ -n "$active" ] && missing=$(probe "$active" "$extra"); then
        PYTHON=$active
        if [ -n "$missing" ]; then
            say "the active environment has this tree but not $missing; installing"
            install "$PYTHON" "$extra"
        fi
    else
        mkdir -p "$ROOT/.venv"
        # Two scripts started at once must not install into each other.
        if command -v flock >/dev/null 2>&1; then
            exec 9>"$ROOT/.venv/.lock"
            flock -n 9 || { say "waiting for another script that is setting up .venv"; flock 9; }
        fi
        use_own_venv "$extra"
        exec 9>&- # not inherited by what runs next
    fi
    # Not from the current directory: another copy of this project there must not be imported instead.
    export PYTHONSAFEPATH=1
}
