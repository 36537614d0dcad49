#!/bin/sh
# Installs Kvant $version from this folder, or removes it:
#
#   ./install.sh [PREFIX]            /usr/local by default, or ~/.local without the right to write there
#   ./install.sh --remove [PREFIX]
set -eu
cd "$$(dirname "$$0")"
remove=
if [ "$${1:-}" = --remove ]; then
    remove=yes
    shift
fi
prefix=$${1:-/usr/local}
if [ $$# -eq 0 ] && ! [ -w /usr/local ]; then prefix=$$HOME/.local; fi
unit=lib/systemd/system/kvant.service
files=$$(find bin share lib -type f)
if [ -n "$$remove" ]; then
    for file in $$files; do rm -f "$$prefix/$$file"; done
    rmdir "$$prefix/share/doc/kvant" 2>/dev/null || true
    echo "Kvant is removed from $$prefix"
    exit
fi
for file in $$files; do
    mkdir -p "$$prefix/$$(dirname "$$file")"
    # A program that runs keeps its old file.
    cp "$$file" "$$prefix/$$file.new" && mv -f "$$prefix/$$file.new" "$$prefix/$$file"
done
if [ "$$prefix" != /usr ]; then
    sed "s|/usr/bin/kvant|$$prefix/bin/kvant|" "$$unit" >"$$prefix/$$unit"
fi
echo "Kvant $version is installed: $$prefix/bin/kvant"
case ":$$PATH:" in
*":$$prefix/bin:"*) ;;
*) echo "$$prefix/bin is not in PATH: export PATH=\"$$prefix/bin:\$$PATH\"" ;;
esac
