# Sourced by demo.sh and test.sh: makes the checkout's own virtual environment, .venv, once, and enters it.
# PYTHON=python3.12 chooses the interpreter (3.11 and 3.12 are tested); EXTRAS says what to install.

if [ ! -e .venv/bin/activate ]; then
  for python in ${PYTHON:-python3.11 python3.12 python3}; do
    command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && break
    python=
  done
  if [ -z "$python" ]; then
    echo "Python 3.11 or 3.12 is needed, for which fairseq has wheels, and none of '${PYTHON:-python3.11 python3.12 python3}' is one: install one, or say where it is with PYTHON=/path/to/python" >&2
    exit 1
  fi
  echo "making .venv with $("$python" --version)" >&2
  "$python" -m venv .venv
fi
. .venv/bin/activate

stamp=.venv/installed-$EXTRAS
if [ ! -e "$stamp" ] || [ -n "$(find setup.py pyproject.toml constraints.txt -newer "$stamp")" ]; then
  # Without a GPU, torch's own index has a build of it that is a tenth of the size. An index that somebody configured stays.
  cpu=https://download.pytorch.org/whl/cpu
  if ! command -v nvidia-smi >/dev/null && ! python -m pip config list | grep index-url >/dev/null; then
    if python -c "import sys, urllib.request as r; r.urlopen(sys.argv[1] + '/torch/', timeout=5)" $cpu 2>/dev/null; then
      export PIP_EXTRA_INDEX_URL=$cpu
    else
      echo "$cpu cannot be reached: torch may come with CUDA, 5 GB in .venv" >&2
    fi
  fi
  echo "installing this checkout into .venv, in place of another copy of the package (a few minutes the first time)" >&2
  quiet=--quiet
  [ ! -t 2 ] || quiet= # whoever looks on sees pip's bars
  python -m pip install $quiet --disable-pip-version-check -c constraints.txt -e ".[$EXTRAS]"
  touch "$stamp"
fi
