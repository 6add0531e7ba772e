#!/bin/sh
# The run's own input is in EDDY_RUN_INPUT; EDDY_TASK_KEY is the same for every attempt.
set -eu
name=$(sed -n 's/.*"name" *: *"\([^"]*\)".*/\1/p')
printf '"Hello %s"\n' "$name"
