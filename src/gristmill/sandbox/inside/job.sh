# Runs one background command whose stdin and output are a stream of its own; stdin begins with its directory and its text.
# The host puts in front: id, from (the number of the stateful call it takes over), the bytes of `directory` and of `command`;
# and stream.sh.
# Reports: u ID PID launched · n ID DIRECTORY had vanished, so it runs in the workspace · d ID CODE ended

take "$directory"
directory=$text
take "$command"
take_over "$from"
printf '%s\0%s\0' "$directory" "$text" >"$io/$$.sh"
enter_directory "$id"
run "$id" '' <&0 2>&1 &
report u "$id" "$!"
wait "$!"
code=$?
rm -f -- "$io/$$.sh"
report d "$id" "$code"
