#pragma once

namespace fakecuda {

struct EntryName {
  const char* name;    // as the reference has it, without a version
  const char* symbol;  // as the library exports it
  int version;         // of CUDA, from which on `name` means `symbol`
};

bool is_entry_point(const char* name);

}  // namespace fakecuda
