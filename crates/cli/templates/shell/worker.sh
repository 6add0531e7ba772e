#!/bin/sh
# A worker: a command for each handler. `eddy worker exec --help` describes what a command gets.
cd "$(dirname "$0")"
exec eddy worker exec look_up=./steps/look_up.sh greet=./steps/greet.sh
