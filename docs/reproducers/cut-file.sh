#!/bin/sh
# A slot file that lacks its last byte ends the server with SIGABRT.
#   LLAMA_SERVER=llama-server MODEL=model.gguf sh cut-file.sh       exit code 0: it happens, 1: it does not
set -eu
url=http://127.0.0.1:${PORT:=8099} dir=$(mktemp -d)
# Without checkpoints the file ends with the state, also on builds that append checkpoints.
$LLAMA_SERVER -m "$MODEL" --port "$PORT" -np 1 -c 4096 --ctx-checkpoints 0 --slot-save-path "$dir" >"$dir/log" 2>&1 &
server=$!
trap 'kill $server 2>"$dir/ended" || true; rm -r "$dir"' EXIT
curl -sf --retry 300 --retry-delay 1 --retry-all-errors "$url/health" >"$dir/health"

prompt=$(printf 'Of a lighthouse keeper who counts ships. %.0s' $(seq 60))
curl -sf "$url/completion" -d '{"prompt":"'"$prompt"'","n_predict":0}' >"$dir/answer"
curl -sf "$url/slots/0?action=save" -d '{"filename":"whole"}'; echo
head -c -1 "$dir/whole" >"$dir/cut"
curl -s "$url/slots/0?action=restore" -d '{"filename":"cut"}' || echo "curl: exit code $?"
code=0
for second in $(seq 60); do # it may write a backtrace first
  kill -0 $server 2>"$dir/ended" || { wait $server || code=$?; break; }
  sleep 1
done
grep GGML_ASSERT "$dir/log" || true
echo "the server's exit code: $code"
[ "$code" = 134 ]
