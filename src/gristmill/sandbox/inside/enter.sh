# Sourced by the shell of every call before the text of its command. Arguments: directory of the calls' files, id,
# directory to run in, file of exported variables, file to save them in afterwards (empty: keep nothing).

if [[ -r $4 ]]; then . "$4"; else . "$1/env"; fi 2>/dev/null
SBX_IO=$1 SBX_ID=$2 SBX_OLD=$3 SBX_SAVE=$5 SBX_BACK=${OLDPWD-} SBX_CODE='' SBX_DIR='' SBX_TEXT=''
{
    IFS= read -rd '' SBX_DIR
    IFS= read -rd '' SBX_TEXT
} <"$1/$2.sh"

# Keeps what the next call starts from; the directory last, which makes it complete.
sbx_save() {
    [[ $SBX_SAVE ]] || return 0
    export -n SBX_CALL
    export -p >|"$SBX_SAVE"
    if [[ $PWD == "$SBX_START" ]]; then printf %s "$SBX_OLD"; else printf %s "$PWD"; fi >|"$SBX_SAVE.cwd"
    SBX_SAVE=
}

# After the last line of the command; an EXIT trap of the command's own runs after it.
sbx_leave() { # exit code
    SBX_CODE=$1
    sbx_save || :
    return "$1"
}

# A shell that was told to exit and one that dies of a signal look the same from here, so the supervisor has to say.
sbx_end() {
    sbx_save
    if [[ $SBX_CODE ]]; then printf 'd %s %s\n' "$SBX_ID" "$SBX_CODE"; else printf 'm %s\n' "$SBX_ID"; fi 1<>"$SBX_IO/reports"
}
# What is ours is silent, also where the command traces itself or traps DEBUG and ERR.
trap '{ sbx_end || :; } &>/dev/null' EXIT

CDPATH='' cd -- "$3" 2>/dev/null || cd /
if [[ $SBX_DIR ]]; then
    case $SBX_DIR in '~' | '~/'*) SBX_DIR=$HOME${SBX_DIR#'~'} ;; esac
    CDPATH='' cd -- "$SBX_DIR" 2>/dev/null || {
        printf 'workdir: cannot enter %s\n' "$SBX_DIR"
        SBX_SAVE='' SBX_CODE=1
        exit 1
    }
fi
SBX_START=$PWD
[[ $SBX_BACK ]] && OLDPWD=$SBX_BACK
true
