#!/bin/sh
# A step: its input is JSON on standard input, its output is JSON on standard output.
# Standard error is the run's log. Exit 65 fails the step without a retry, any other code but 0 with one.
set -eu
echo "looking up a language, attempt $EDDY_ATTEMPT" >&2

# Fails the first time, so that you can see a retry.
if [ "$EDDY_ATTEMPT" = 1 ]; then
  echo "the dictionary does not answer" >&2
  exit 75
fi
echo '{"language": "en"}'
