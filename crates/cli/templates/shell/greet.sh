#!/bin/sh
# The flow passes only what a step needs: here a language, which is "en" with its quotes, as JSON is. The name is put into
# the greeting by the flow's output. A script that takes larger JSON apart needs a tool that can, such as jq or python3.
set -eu
language=$(cat)
case $language in
  '"en"') echo '"Hello"' ;;
  '"fr"') echo '"Bonjour"' ;;
  *) echo "nobody here speaks $language" >&2; exit 65 ;;
esac
