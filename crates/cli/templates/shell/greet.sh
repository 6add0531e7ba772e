#!/bin/sh
# The input is JSON: here a language, such as "en" with its quotes. The flow passes only what the step needs, and its output
# adds the name to the greeting. To parse larger JSON, use a tool such as jq or python3.
set -eu
language=$(cat)
case $language in
  '"en"') echo '"Hello"' ;;
  '"fr"') echo '"Bonjour"' ;;
  *) echo "unknown language $language" >&2; exit 65 ;;
esac
