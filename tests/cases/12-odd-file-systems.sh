#!/usr/bin/env bash
# safetensors#792, Lightning#18088: log folder without fsync of folders, without rename, without locks
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
cat >o.c <<'E'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <fcntl.h>
static int is(const char*w){const char*v=getenv("ODD");return v&&!strcmp(v,w);}
static int ours(const char*p){return p&&strstr(p,"logs");}
int fsync(int d){int(*r)(int)=dlsym(RTLD_NEXT,"fsync");struct stat s;if(is("fsync")&&!fstat(d,&s)&&S_ISDIR(s.st_mode)){errno=EINVAL;return -1;}if(is("enotsup")&&!fstat(d,&s)&&S_ISDIR(s.st_mode)){errno=ENOTSUP;return -1;}return r(d);}
int rename(const char*a,const char*b){int(*r)(const char*,const char*)=dlsym(RTLD_NEXT,"rename");if(is("rename")&&ours(a)){errno=ENOSYS;return -1;}return r(a,b);}
int flock(int d,int o){int(*r)(int,int)=dlsym(RTLD_NEXT,"flock");char l[64],b[999];ssize_t n;if(is("flock")){strcpy(l,"/proc/self/fd/");char t[12];int i=11;t[i]=0;int x=d;do{t[--i]='0'+x%10;x/=10;}while(x);strcat(l,t+i);extern ssize_t readlink(const char*,char*,size_t);n=readlink(l,b,998);if(n>0){b[n]=0;if(ours(b)){errno=ENOLCK;return -1;}}}return r(d,o);}
E
command -v cc >/dev/null || ok "no compiler here: skipped"
cc -shared -fPIC -o o.so o.c -ldl 2>cc.err || bad "$(head -1 cc.err)"
mk d a b; res=""
for m in fsync enotsup flock rename; do
  s=$SECONDS; ODD=$m LD_PRELOAD=$W/o.so timeout -k 3 35 "$PY" "$P/scripts/train_distributed.py" --model-type basic_cnn --epochs 2 --batch-size 4 --image-size 32 --data d --tensorboard false --report false --cache off --progress off --log-dir logs --run-name $m >out 2>&1; rc=$?; echo "$m: exit $rc after $((SECONDS-s)) s: $(grep -v '^ *$' out | tail -2 | tr '\n' '|' | cut -c1-400)"; cp out out.$m
  case $m in rename) [ $rc = 2 ] || res="$res rename(exit $rc)";; *) [ $rc = 0 ] && ! grep -qi 'failed\|cannot' out || res="$res $m(exit $rc: $(grep -i 'failed\|cannot\|error' out | head -1 | cut -c1-150))";; esac
done
ODD=rename LD_PRELOAD=$W/o.so tool doctor --data d --log-dir logs; grep -i 'log' out | head -3
[ -z "$res" ] && ok "passed over, rename refused before training"; bad "$res"
