#!/bin/sh
# Prints the home of a Java that Spark takes, 17 or later: JAVA_HOME's, that on the PATH, or Homebrew's,
# which is on none. Exits with 1 if there is none. macOS has a `java` of its own that only asks for one.
set -eu

for java in "${JAVA_HOME:-/nowhere}/bin/java" java /opt/homebrew/opt/openjdk@17/bin/java \
    /usr/local/opt/openjdk@17/bin/java; do
    said=$("$java" -XshowSettings:properties -version 2>&1) || continue
    home=$(echo "$said" | sed -n 's/^ *java\.home = //p')
    version=$(echo "$said" | sed -n 's/^ *java\.specification\.version = //p')
    if [ -n "$home" ] && [ "${version%%.*}" -ge 17 ]; then
        echo "$home"
        exit 0
    fi
done
exit 1
