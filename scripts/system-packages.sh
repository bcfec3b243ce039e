#!/bin/sh
# Installs what is missing of the programs named: system-packages.sh [python] [redis] [valkey]
# [postgresql] [pgbouncer] [chromium] [gettext] [java], from Debian's packages or Homebrew. The tests start servers of
# their own, on free ports; no system service is started or used. Debian has Valkey from 13 on.
set -eu

there() {
    case $1 in
    python) scripts/find-python.sh >/dev/null ;;
    redis) first "${DJQUEUE_TEST_REDIS_SERVER:-redis-server}" redis-server valkey-server ;;
    valkey) first valkey-server ;;
    postgresql) first initdb /usr/lib/postgresql/*/bin/initdb \
        /opt/homebrew/opt/postgresql*/bin/initdb /usr/local/opt/postgresql*/bin/initdb ;;
    pgbouncer) first pgbouncer /usr/sbin/pgbouncer ;;
    chromium) first "${DJQUEUE_TEST_CHROMIUM:-chromium}" chromium chromium-browser google-chrome \
        "/Applications/Chromium.app/Contents/MacOS/Chromium" \
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" ;;
    gettext) first msgmerge ;;
    java) scripts/find-java.sh >/dev/null ;;
    *) echo "system-packages.sh: do not know '$1'" >&2 && exit 2 ;;
    esac
}

first() {
    for candidate in "$@"; do
        command -v "$candidate" >/dev/null && return 0
    done
    return 1
}

debian_name() {
    case $1 in
    python) echo "python3 python3-venv" ;;
    redis) echo redis-server ;;
    valkey) echo valkey-server ;;
    java) echo default-jre-headless ;;
    *) echo "$1" ;;
    esac
}

brew_name() {
    case $1 in
    python) echo python@3.13 ;;
    postgresql) echo postgresql@17 ;;
    java) echo openjdk@17 ;;
    chromium) echo google-chrome ;; # a cask; Chromium's own is no longer offered
    *) echo "$1" ;;
    esac
}

give_up() {
    echo "$1" >&2
    echo "The tests need: $missing. Please install them, then run this again." >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

become_root() {
    [ "$(id -u)" -eq 0 ] && return
    command -v sudo >/dev/null || give_up "Installing needs root, and there is no sudo."
    sudo -n true 2>/dev/null && return
    { [ -t 0 ] && sudo -v; } || give_up "Installing needs root, and sudo refuses."
}

install_with_apt() {
    become_root
    # While this file is there, Debian's packages do not start their services.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'as_root rm -f "$policy"' EXIT
        trap 'exit 130' INT TERM
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
        as_root chmod +x "$policy"
    fi
    as_root apt-get update -qq || echo "apt-get update failed; trying with the lists there are." >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" \
        >/dev/null || give_up "apt-get install $* failed."
}

missing=
for program in "${@:-python}"; do
    there "$program" || missing="$missing $program"
done
missing=${missing# }
[ -n "$missing" ] || exit 0

names=
if command -v apt-get >/dev/null; then
    for program in $missing; do names="$names $(debian_name "$program")"; done
    echo "Installing with apt-get:$names"
    # shellcheck disable=SC2086
    install_with_apt $names
elif command -v brew >/dev/null; then
    for program in $missing; do names="$names $(brew_name "$program")"; done
    echo "Installing with brew:$names"
    # shellcheck disable=SC2086
    brew install --quiet $names || give_up "brew install$names failed."
else
    give_up "Neither apt-get nor brew is here."
fi

for program in $missing; do
    there "$program" || give_up "$program is still not found."
done
