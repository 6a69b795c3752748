#!/usr/bin/env bash
# Installs the C interface on Linux: the header, its C++17 wrapper, the shared and the static library, and flashcore.pc for pkg-config.
#
#   scripts/install-c.sh PREFIX        e.g. /usr/local, or "$HOME/.local"
#   DESTDIR=/tmp/package scripts/install-c.sh /usr
#
# Then:   cc program.c $(pkg-config --cflags --libs flashcore)
#
# FLASHCORE_LIBRARY_FOLDER names a folder with libraries that were built before; else a release build makes them.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#/}" = "$1" ]; then
    echo "usage: [DESTDIR=FOLDER] $0 PREFIX, an absolute path like /usr/local" >&2
    exit 2
fi
prefix="${1%/}"
repository="$(cd "$(dirname "$0")/.." && pwd)"
crate="$repository/crates/flashcore-c"
libraries="${FLASHCORE_LIBRARY_FOLDER:-}"
if [ -z "$libraries" ]; then
    cargo build --quiet --release --locked --package flashcore-c --manifest-path "$repository/Cargo.toml"
    libraries="${CARGO_TARGET_DIR:-$repository/target}/release"
fi

# From the header, so that what is installed says one thing.
version="$(sed -n 's/^#define FLASHCORE_VERSION "\(.*\)"$/\1/p' "$crate/include/flashcore.h")"
major="${version%%.*}"
compatible="$major"
if [ "$major" = 0 ]; then
    compatible="$(echo "$version" | cut -d. -f1,2)" # as in build.rs
fi

root="${DESTDIR:-}$prefix"
mkdir -p "$root/include" "$root/lib/pkgconfig"
install -m 644 "$crate/include/flashcore.h" "$root/include/flashcore.h"
install -m 644 "$crate/include/flashcore.hpp" "$root/include/flashcore.hpp"
install -m 755 "$libraries/libflashcore.so" "$root/lib/libflashcore.so.$version"
ln -sf "libflashcore.so.$version" "$root/lib/libflashcore.so.$compatible"
ln -sf "libflashcore.so.$compatible" "$root/lib/libflashcore.so"
install -m 644 "$libraries/libflashcore.a" "$root/lib/libflashcore.a"
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$crate/flashcore.pc.in" > "$root/lib/pkgconfig/flashcore.pc"
echo "installed flashcore $version in $root"
