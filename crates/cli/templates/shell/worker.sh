#!/bin/sh
# A worker: a command for each handler. `eddy worker exec --help` says what a command is told.
cd "$(dirname "$0")"
exec eddy worker exec look_up=./steps/look_up.sh greet=./steps/greet.sh
