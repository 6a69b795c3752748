#!/usr/bin/env bash
# Installs NVIDIA's PTX assembler and prints its path. Tests and tools that assemble PTX find it there by themselves;
# nothing else of CUDA is needed, and no GPU.
#
#   scripts/install-ptxas.sh [directory]      default: .venv/ptxas in the repository root
#
# Running it again changes nothing and prints the same path.
set -euo pipefail

# CUDA 13.0: assembles PTX up to 9.0 for every architecture from sm_75 to sm_121. The version is exact, so that the
# register counts and spills that tests compare are the same on every machine.
package="nvidia-cuda-nvcc"
version="13.0.88"

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
directory="${1:-$repository/.venv/ptxas}"
python="$directory/bin/python"

find_ptxas() {
    # Asked of the version too: otherwise an older installation would go on being used after the pin moves.
    [ -d "$directory" ] || return 1
    [ -n "$(find "$directory" -type d -name "${package//-/_}-$version.dist-info")" ] || return 1
    find "$directory" -type f -name ptxas -perm -u+x | grep .
}

if ! find_ptxas >/dev/null; then
    [ -x "$python" ] || python3 -m venv "$directory" >&2
    # ptxas itself needs none of the dependencies that the compiler beside it has.
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$package==$version" >&2
fi
find_ptxas || {
    echo "install-ptxas.sh: $package $version is installed in $directory but holds no ptxas; is there a build of it for this platform?" >&2
    exit 1
}
