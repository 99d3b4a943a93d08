#!/bin/sh
# A request pinned to a busy slot changes the answer that is running there.
#   LLAMA_SERVER=llama-server MODEL=model.gguf sh busy-slot.sh      exit code 0: it happens, 1: it does not
set -eu
url=http://127.0.0.1:${PORT:=8099} dir=$(mktemp -d)
# The last flags make the logits the same whatever else is in the batch, so that the texts can be compared.
$LLAMA_SERVER -m "$MODEL" --port "$PORT" -np 2 -c 8192 -fa off -ctk f32 -ctv f32 >"$dir/log" 2>&1 & server=$!
trap 'kill $server; rm -r "$dir"' EXIT
curl -sf --retry 300 --retry-delay 1 --retry-all-errors "$url/health" >"$dir/health"

long=$(printf 'Of a lighthouse keeper who counts ships. %.0s' $(seq 30))
other=$(printf 'Of a miller who lost his wheel. %.0s' $(seq 30))
ask() { # PROMPT TOKENS: stream an answer from slot 0
  curl -sN "$url/completion" -d '{"prompt":"'"$1"'","n_predict":'"$2"',"id_slot":0,"stream":true,
    "temperature":0,"ignore_eos":true}'
}
text() { sed -n 's/^data: {"index":[0-9]*,"content":\(".*"\),"tokens".*/\1/p' "$1"; }

for run in expected again; do
  ask "$other" 4 >"$dir/other" # moves to the RAM cache when the long one starts
  ask "$long" 600 >"$dir/running"
  text "$dir/running" >"$dir/$run"
done
cmp "$dir/expected" "$dir/again" || exit 2 # one prompt, two texts: this backend cannot show it
for attempt in 1 2 3 4 5 6; do # on a busy machine the second request may come too late
  ask "$other" 4 >"$dir/other"
  : >"$dir/running"; ask "$long" 600 >>"$dir/running" & running=$!
  until [ "$(wc -l <"$dir/running")" -ge 20 ]; do sleep 0.01; done
  ask "$other" 4 >"$dir/other"
  wait $running
  text "$dir/running" >"$dir/found"
  if ! cmp -s "$dir/expected" "$dir/found"; then
    echo "attempt $attempt: the answer changed at token $(cmp "$dir/expected" "$dir/found" | sed 's/.*line //')"
    exit 0
  fi
done
echo "the answer is the same in all attempts"
exit 1
