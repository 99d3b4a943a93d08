#!/bin/sh
# How a server of three slots reads bodies and paths that can be read in two ways.
#   LLAMA_SERVER=llama-server MODEL=model.gguf sh bodies.sh
set -eu
url=http://127.0.0.1:${PORT:=8099} dir=$(mktemp -d)
$LLAMA_SERVER -m "$MODEL" --port "$PORT" -np 3 -c 4096 >"$dir/log" 2>&1 & server=$!
trap 'kill $server; rm -r "$dir"' EXIT
curl -sf --retry 300 --retry-delay 1 --retry-all-errors "$url/health" >"$dir/health"

try() { # WHAT, what is sent in place of "id_slot":1, text behind the body, PATH, more of curl's arguments
  what=$1 field=$2 behind=$3 path=$4
  shift 4
  printf '{"prompt":"ship","n_predict":1,"response_fields":["id_slot"]%s}'"$behind" ",$field" >"$dir/body"
  read=$(curl -s --path-as-is -w ' %{http_code}' "$url$path" --data-binary @"$dir/body" "$@" |
    sed 's/.*"id_slot":\([0-9]*\)[^0-9].* 200$/slot=\1/; s/.* \([0-9]*\)$/\1/; s/=/ /')
  echo "$what: $read"
}

curl -sf "$url/completion" -d '{"prompt":"ship","n_predict":1,"id_slot":0}' >"$dir/first"
try 'two equal keys' '"id_slot":0,"id_slot":2' '' /completion
try 'an escaped key' '"id\u005fslot":2' '' /completion
try 'a fraction' '"id_slot":2.9' '' /completion
try 'true' '"id_slot":true' '' /completion
try 'a number of no slot' '"id_slot":99998' '' /completion
try 'a number of 33 bits' '"id_slot":4294967298' '' /completion
try 'a number beyond 64 bits' '"id_slot":1e30' '' /completion
try 'a negative number' '"id_slot":-2' '' /completion
try 'more behind a NUL byte' '"id_slot":2' '\0{"id_slot":0}' /completion
try 'another encoding' '"id_slot":2' '' /completion -H 'Content-Encoding: gzip'
try '%u in the path' '"id_slot":2' '' /completio%u006e
try 'an encoded letter' '"id_slot":2' '' /%63ompletion
try 'none named' '"x":2' '' /completion # so the others were read
