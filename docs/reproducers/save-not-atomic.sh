#!/bin/sh
# A save writes to the final name: one that fails leaves an incomplete file where a good one was.
#   LLAMA_SERVER=llama-server MODEL=model.gguf sh save-not-atomic.sh   exit code 0: it happens, 1: it does not
# A limit on the size of files stands for a full disk.
set -eu
url=http://127.0.0.1:${PORT:=8099} dir=$(mktemp -d)
serve() { # LIMIT in blocks of 512 bytes
  (trap '' XFSZ; ulimit -f "$1"; exec $LLAMA_SERVER -m "$MODEL" --port "$PORT" -np 1 -c 8192 --ctx-checkpoints 0 \
    --slot-save-path "$dir") >/dev/null 2>&1 & server=$!
  curl -sf --retry 300 --retry-delay 1 --retry-all-errors "$url/health" >/dev/null
}
stop() { kill $server 2>/dev/null || true; wait $server || true; }
trap 'stop; rm -r "$dir"' EXIT
save() { # NUMBER OF WORDS: print the answer and the status, and set `size`
  curl -sf "$url/completion" -d '{"prompt":"'"$(printf 'ship %.0s' $(seq "$1"))"'","n_predict":0}' >/dev/null
  curl -s -w ' %{http_code}\n' "$url/slots/0?action=save" -d '{"filename":"state"}'
  size=$(wc -c <"$dir/state")
  echo "the file has $size bytes"
}

serve unlimited
save 1000
whole=$size
save 500
good=$size
stop

echo "with room for half of the file:"
serve $((whole / 1024))
save 1000
half=$size
curl -s -w ' %{http_code}\n' "$url/slots/0?action=restore" -d '{"filename":"state"}' || echo "the server has ended"
stop

echo "with room for all but the last bytes:"
serve $(((whole - 1) / 512))
save 1000
[ "$half" -lt "$whole" ] && [ "$half" != "$good" ]
